// Plays the films of a page. Every token has its place from the start, so only colors change; only a draft takes
// the room that it needs, ahead of the text.
for (const figure of document.querySelectorAll(".film")) {
  const { given, steps } = JSON.parse(figure.querySelector("script").textContent);
  const stage = figure.querySelector(".stage");
  const [button, slider, speed] = figure.querySelectorAll("button, input, select");
  const status = figure.querySelector("output");
  const tokens = [...stage.querySelectorAll(".token")];
  const final = tokens.map((token) => token.textContent);
  const blocks = [...stage.querySelectorAll(".block")];
  const isBlock = (step) => step !== undefined && step[0] === "block";
  const blockCount = steps.filter(isBlock).length;
  // The moments of a film with drafts are its passes, which end with their drafts; those of other films are steps.
  // A moment is stored as the number of steps done.
  const passes = steps.flatMap(([kind], i) => (kind === "draft" ? [i + 1] : [])).slice(0, -1);
  const hasDrafts = steps.some(([kind]) => kind === "draft");
  const moments = [0, ...(hasDrafts ? [...passes, steps.length] : steps.map((_, i) => i + 1))];
  const last = moments.length - 1;
  const settled = 3; // moments until a revealed token looks like the others
  let at = 0;
  let timer = 0;

  const stateAt = (end) => {
    const state = given.map((piece) => ({ piece, since: -settled }));
    let block = 0;
    let shown = 0;
    let now = [0, 0];
    let drafts = new Map();
    let moment = 0;
    for (let i = 0; i < moments[end]; i++) {
      const [kind, place, value] = steps[i];
      while (moments[moment + 1] <= i) moment += 1;
      if (kind === "block") {
        now = [place, value];
        block += 1;
        while (state.length < value) state.push({ piece: null, since: moment });
      } else if (kind === "show") {
        state[place] = { piece: value, since: moment };
        shown += 1;
      } else if (kind === "hide") {
        state[place] = { piece: null, since: moment };
      } else if (kind === "draft") {
        drafts = new Map(place);
      } else {
        state.length = place;
        drafts = new Map();
        now = [0, 0];
      }
    }
    return { state, drafts, block, shown, now };
  };

  const draw = (end) => {
    at = end;
    slider.value = end;
    const { state, drafts, block, shown, now } = stateAt(end);
    const finished = end === last;
    // Drafts change the lines after them, which are empty; everything below the text keeps its place.
    tokens.forEach((token, place) => {
      token.textContent = final[place];
      token.classList.remove("draft");
    });
    stage.style.height = "";
    if (drafts.size > 0) stage.style.height = `${stage.offsetHeight}px`;
    tokens.forEach((token, place) => {
      const item = state[place];
      const isOpen = item === undefined || item.piece === null;
      const draft = isOpen ? drafts.get(place) : undefined;
      const isDraft = draft !== undefined;
      const age = finished || isOpen ? settled : end - 1 - item.since;
      token.classList.toggle("draft", isDraft);
      token.classList.toggle("later", item === undefined && !isDraft);
      token.classList.toggle("mask", item !== undefined && isOpen && !isDraft);
      token.classList.toggle("fresh", age < 1);
      token.classList.toggle("recent", age >= 1 && age < settled);
      token.ariaHidden = isDraft ? "true" : null; // it is not part of the text
      if (isDraft) token.textContent = draft;
      else if (!isOpen) token.textContent = item.piece;
    });
    blocks.forEach((element) => {
      const start = Number(element.dataset.start);
      element.classList.toggle("now", !finished && start === now[0] && now[1] > 0);
      element.classList.toggle("later", start >= state.length);
    });
    status.textContent = finished
      ? `finished: ${shown} tokens uncovered`
      : `${hasDrafts ? `pass ${end} of ${last}` : `block ${block} of ${blockCount}`}, ${shown} tokens uncovered`;
    slider.setAttribute("aria-valuetext", status.textContent);
  };

  const pause = () => {
    clearTimeout(timer);
    timer = 0;
    button.textContent = "Play";
  };
  const tick = () => {
    if (at >= last) return pause();
    draw(at + 1);
    timer = setTimeout(tick, 200 / Number(speed.value));
  };
  const play = () => {
    if (at >= last) draw(0);
    button.textContent = "Pause";
    timer = setTimeout(tick, 0);
  };

  button.addEventListener("click", () => (timer ? pause() : play()));
  slider.addEventListener("input", () => {
    pause();
    draw(Number(slider.value));
  });
  addEventListener("beforeprint", () => {
    pause();
    draw(last);
  });
  if (hasDrafts) addEventListener("resize", () => draw(at));
  slider.max = last;
  figure.querySelector(".controls").hidden = false;
  // The film starts paused in the middle of a block, where there is most to see, or where there are drafts.
  const isWorthSeeing = (moment) =>
    hasDrafts ? stateAt(moment).drafts.size > 0 : isBlock(steps[moment - 3]);
  let poster = Math.round(last / 2);
  while (poster < last && !isWorthSeeing(poster)) poster += 1;
  draw(poster);
}
