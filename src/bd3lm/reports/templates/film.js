// Plays the films of a page. Every token has its place from the start, so nothing moves but the colours.
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
  const settled = 3; // steps until a token that was uncovered looks like the others
  let at = 0;
  let timer = 0;

  const stateAt = (end) => {
    const state = given.map((piece) => ({ piece, since: -settled }));
    let block = 0;
    let shown = 0;
    let now = [0, 0];
    for (let i = 0; i < end; i++) {
      const [kind, place, value] = steps[i];
      if (kind === "block") {
        now = [place, value];
        block += 1;
        while (state.length < value) state.push({ piece: null, since: i });
      } else if (kind === "show") {
        state[place] = { piece: value, since: i };
        shown += 1;
      } else if (kind === "hide") {
        state[place] = { piece: null, since: i };
      } else {
        state.length = place;
        now = [0, 0];
      }
    }
    return { state, block, shown, now };
  };

  const draw = (end) => {
    at = end;
    slider.value = end;
    const { state, block, shown, now } = stateAt(end);
    const finished = end === steps.length;
    tokens.forEach((token, place) => {
      const item = state[place];
      const age = finished || item === undefined || item.piece === null ? settled : end - 1 - item.since;
      token.classList.toggle("later", item === undefined);
      token.classList.toggle("mask", item !== undefined && item.piece === null);
      token.classList.toggle("fresh", age < 1);
      token.classList.toggle("recent", age >= 1 && age < settled);
      token.textContent = item && item.piece !== null ? item.piece : final[place];
    });
    blocks.forEach((element) => {
      const start = Number(element.dataset.start);
      element.classList.toggle("now", !finished && start === now[0] && now[1] > 0);
      element.classList.toggle("later", start >= state.length);
    });
    status.textContent = finished
      ? `finished: ${shown} tokens uncovered`
      : `block ${block} of ${blockCount}, ${shown} tokens uncovered`;
    slider.setAttribute("aria-valuetext", status.textContent);
  };

  const pause = () => {
    clearTimeout(timer);
    timer = 0;
    button.textContent = "Play";
  };
  const tick = () => {
    if (at >= steps.length) return pause();
    draw(at + 1);
    timer = setTimeout(tick, 200 / Number(speed.value));
  };
  const play = () => {
    if (at >= steps.length) draw(0);
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
    draw(steps.length);
  });
  slider.max = steps.length;
  figure.querySelector(".controls").hidden = false;
  // It waits in the middle of a block, where there is most to see.
  let poster = Math.round(steps.length / 2);
  while (poster < steps.length && !isBlock(steps[poster - 3])) poster += 1;
  draw(poster);
}
