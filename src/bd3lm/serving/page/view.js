// Draws and plays a film, and describes each token. Text is only ever set as textContent.

import {
  SETTLED, addSteps, countsOf, createFilm, endFilm, hasDrafts, mend, momentsOf, passesAt, pieceAt, piecesOf, readable,
  stateAt, wrongDrafts,
} from "./film.js";

const VERDICT = 0.45; // how long wrong drafts are struck through, as a share of a moment's time
const LONGEST_VERDICT = 220; // milliseconds
const calm = matchMedia("(prefers-reduced-motion: reduce)");

const percent = (logP) => {
  const share = 100 * Math.exp(logP);
  if (share < 0.1) return "< 0.1 %";
  return `${share < 9.95 ? share.toFixed(1) : Math.round(share)} %`;
};

const element = (kind, className, text) => {
  const made = document.createElement(kind);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
};

/** A quoted piece of text, with visible spaces and line breaks. */
const quoted = (piece) => {
  const shown = readable(piece).replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "␣");
  return `“${shown}”`;
};

const fixed = (number, digits) =>
  number.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });

/**
 * The view of one text. `onRefill(template parts)` is called to write a part of it again; without it no part can be
 * selected. `onMoment(tokens, passes, all passes)` is called with each moment that is shown.
 */
export const createView = (root, { name, onRefill, onMoment } = {}) => {
  const part = (selector) => root.querySelector(selector);
  const [stage, playButton, slider, speed] = [".stage", ".play", ".slider", ".speed"].map(part);
  const [position, status, detail, refill] = [".position", ".status", ".detail", ".refill"].map(part);
  const counters = {
    tokens: part(".count-tokens"),
    passes: part(".count-passes"),
    rate: part(".count-rate"),
    speed: part(".count-speed"),
  };
  let film = createFilm();
  let first = 0; // the first position to draw: a conversation shows only the answer
  let moments = [0];
  let at = 0;
  let isLive = false;
  let follows = true; // show each moment as it arrives
  let timer = 0;
  let frame = 0;
  let final = null; // the pieces of the finished text, which reserve room for each token
  let whole = null; // the server's counts for the finished text, and its seconds
  let began = 0;
  let elements = [];
  let current = -1; // the token from which keys move
  let picked = null;
  stage.setAttribute("aria-label", name ? `The text of ${name}` : "The text");

  const last = () => moments.length - 1;

  // --- drawing ---

  const tokenAt = (place) => {
    while (elements.length <= place) {
      const made = element("span", "token");
      made.dataset.place = elements.length;
      elements.push(made);
      stage.append(made);
    }
    return elements[place];
  };

  /** A token's rank in its block or, if blocks are single tokens, its pass. */
  const shareOf = (token) => {
    if (token.size > 1) return (token.rank + 1) / token.size;
    return hasDrafts(film) ? ((token.since % 2) + 1) / 2 : 0;
  };

  const drawToken = (place, state, drawn) => {
    const token = state.tokens[place];
    const isOpen = token === undefined || token.piece === null;
    const draft = isOpen ? state.drafts.get(place) : undefined;
    const isDraft = draft !== undefined;
    const isMask = token !== undefined && isOpen && !isDraft;
    const own = final?.[place];
    const age = isOpen || drawn.isEnd ? SETTLED : drawn.end - 1 - token.since;
    const made = tokenAt(place);
    const classes = {
      given: token?.isGiven,
      mask: isMask,
      thin: isMask && own !== undefined && own.trim() === "",
      draft: isDraft,
      wrong: isDraft && drawn.wrong.has(place),
      later: token === undefined && !isDraft,
      fresh: age < 1,
      recent: age >= 1 && age < SETTLED,
      edge: drawn.edges.has(place),
      now: !drawn.isEnd && place >= state.now[0] && place < state.now[1] && state.now[1] - state.now[0] > 1,
    };
    made.className = ["token", ...Object.keys(classes).filter((each) => classes[each])].join(" ");
    made.ariaHidden = isDraft || token === undefined ? "true" : null; // it is not part of the text
    const text = isDraft ? draft : isOpen ? (own ?? "\u00a0\u00a0\u00a0") : pieceAt(film, place, token.piece);
    const shown = readable(text);
    if (made.textContent !== shown) made.textContent = shown;
    made.style.setProperty("--share", isOpen || token.isGiven ? 0 : shareOf(token));
  };

  const drawState = (state, end, wrong) => {
    const drawn = {
      end,
      wrong: new Set(wrong),
      isEnd: film.ended && end === last(),
      edges: new Set(state.blocks.flatMap(([start, stop]) => (stop - start > 1 && start > 0 ? [start] : []))),
    };
    const reached = Math.max(state.tokens.length, ...[...state.drafts.keys()].map((place) => place + 1));
    const count = Math.max(reached, final?.length ?? 0);
    while (elements.length > count) elements.pop().remove();
    for (let place = first; place < count; place += 1) drawToken(place, state, drawn);
    for (let place = 0; place < Math.min(first, elements.length); place += 1) elements[place].hidden = true;
  };

  const draw = (end) => {
    at = Math.min(end, last());
    const state = stateAt(film, moments, at);
    drawState(state, at, []);
    describePosition();
    countTo(state);
  };

  /** The tokens and passes up to a moment, in which two texts played at one pace differ. */
  const countTo = (state) => {
    const passes = passesAt(film, moments, at);
    const written = state.tokens.filter((token) => token.piece !== null && !token.isGiven).length;
    // At the end use the server's counts, which for several fills include the passes of all.
    const isOwn = whole === null || (at < last() && passesAt(film, moments, last()) === whole.passes);
    const counts = isOwn ? { written, passes } : whole;
    onMoment?.(counts.written, counts.passes, whole?.passes ?? passes);
    if (whole !== null) drawCounts(counts, whole.seconds, whole.written);
  };

  /** Step forward one moment, after striking through the drafts that it rejects. */
  const advance = (pause) => {
    const before = stateAt(film, moments, at);
    const wrong = wrongDrafts(before, stateAt(film, moments, at + 1));
    if (wrong.length === 0 || calm.matches) {
      draw(at + 1);
      return pause;
    }
    const verdict = Math.min(pause * VERDICT, LONGEST_VERDICT);
    drawState(before, at, wrong);
    slider.value = at + 1;
    timer = setTimeout(() => {
      draw(at + 1);
      if (isPlaying()) timer = setTimeout(tick, pause - verdict);
    }, verdict);
    return null;
  };

  const describePosition = () => {
    slider.max = last();
    slider.value = at;
    const unit = hasDrafts(film) ? "pass" : "step";
    position.textContent = last() === 0 ? "" : `${unit} ${at} of ${last()}`;
    slider.setAttribute("aria-valuetext", position.textContent || "empty");
  };

  const drawCounts = (counts, seconds, written = counts.written) => {
    counters.tokens.textContent = counts.written.toLocaleString("en");
    counters.passes.textContent = counts.passes.toLocaleString("en");
    counters.rate.textContent = counts.passes ? fixed(counts.written / counts.passes, 2) : "–";
    const pace = seconds > 0 ? written / seconds : 0;
    counters.speed.textContent = pace > 0 ? fixed(pace, pace < 10 ? 1 : 0) : "–";
  };

  const drawLive = () => {
    frame = 0;
    moments = momentsOf(film);
    if (follows) {
      // A single new moment first strikes drafts through; if several arrive together, only the last shows.
      const isNext = at === last() - 1 && !calm.matches;
      const wrong = isNext ? wrongDrafts(stateAt(film, moments, at), stateAt(film, moments, at + 1)) : [];
      if (wrong.length > 0) {
        drawState(stateAt(film, moments, at), at, wrong);
        at += 1;
        frame = requestAnimationFrame(drawLive);
        return;
      }
      draw(last());
    } else {
      describePosition();
    }
    drawCounts(countsOf(film), (performance.now() - began) / 1000);
  };

  const drawSoon = () => {
    frame ||= requestAnimationFrame(drawLive);
  };

  // --- playing ---

  let playing = false;
  const isPlaying = () => playing;

  const setPlaying = (value) => {
    playing = value;
    clearTimeout(timer);
    playButton.textContent = value ? "Pause" : "Play";
  };

  const tick = () => {
    if (at >= last()) {
      follows = isLive;
      setPlaying(false);
      return;
    }
    const pause = advance(1000 / Number(speed.value));
    if (pause !== null) timer = setTimeout(tick, pause);
  };

  const play = (from = at >= last() ? 0 : at) => {
    follows = false;
    draw(from);
    setPlaying(true);
    timer = setTimeout(tick, 0);
  };

  const goTo = (moment) => {
    setPlaying(false);
    const to = Math.min(Math.max(moment, 0), last());
    follows = isLive && to === last();
    if (to === at + 1) advance(1000);
    else draw(to);
  };

  const stepBy = (number) => goTo(at + number);

  playButton.addEventListener("click", () => {
    if (playing) setPlaying(false);
    else if (last() > 0) play();
  });
  slider.addEventListener("input", () => goTo(Number(slider.value)));
  part(".order").addEventListener("change", (event) => stage.classList.toggle("ordered", event.target.checked));

  // --- tokens ---

  const whenOf = (token) => {
    if (token.isGiven) return "given";
    if (hasDrafts(film)) return `pass ${token.since + 1}${token.wasDrafted ? ", guessed correctly" : ""}`;
    const isPass = whole === null || whole.passes === film.steps.filter(([kind]) => kind === "show").length;
    return `${isPass ? "pass" : "reveal"} ${token.order}`;
  };

  const describe = (place) => {
    const { tokens, drafts } = stateAt(film, moments, at);
    const token = tokens[place];
    detail.replaceChildren();
    if (token === undefined || token.piece === null) {
      const draft = drafts.get(place);
      if (draft !== undefined) detail.textContent = `${quoted(draft)} is a draft, not yet part of the text`;
      else if (token) detail.textContent = "A mask: no token is written here yet";
      return;
    }
    detail.append(element("b", "", quoted(pieceAt(film, place, token.piece))));
    detail.append(element("span", "", `token ${place - first + 1}`), element("span", "", whenOf(token)));
    if (typeof token.logP === "number") detail.append(element("span", "", `probability ${percent(token.logP)}`));
    if (Array.isArray(token.others) && token.others.length > 0) detail.append(alternatives(token));
  };

  const alternatives = (token) => {
    const list = element("ul", "others");
    list.setAttribute("aria-label", "The most likely tokens");
    for (const [piece, logP] of token.others) {
      const item = element("li", piece === token.piece ? "chosen" : "");
      item.style.setProperty("--p", Math.exp(logP));
      item.append(element("span", "", quoted(piece)), element("span", "", percent(logP)));
      list.append(item);
    }
    return list;
  };

  const placeOf = (node) => {
    const found = (node instanceof Element ? node : node?.parentElement)?.closest(".token");
    return found && stage.contains(found) ? Number(found.dataset.place) : null;
  };

  const mark = (place) => {
    elements[current]?.classList.remove("current");
    current = place;
    if (place >= 0) describe(place);
  };

  const focusToken = (place, isExtending) => {
    const to = Math.min(Math.max(place, first), elements.length - 1);
    if (to < first) return;
    const from = picked && isExtending ? picked.anchor : Math.max(current, first);
    mark(to);
    elements[to].tabIndex = -1; // only now: chromium cannot start a selection at a focusable token
    elements[to].focus();
    if (isExtending) select(from, to);
    else getSelection().removeAllRanges();
  };

  stage.addEventListener("pointerover", (event) => {
    const place = placeOf(event.target);
    if (place !== null) mark(place);
  });
  stage.addEventListener("pointerdown", (event) => {
    const place = placeOf(event.target);
    if (place !== null) mark(place);
  });
  stage.addEventListener("focusin", (event) => {
    const place = placeOf(event.target);
    if (place !== null) mark(place);
  });
  stage.addEventListener("focusout", (event) => {
    if (event.target !== stage) event.target.removeAttribute("tabindex");
  });
  stage.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (move === undefined || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    event.stopPropagation();
    focusToken(current < first ? first : current + move, event.shiftKey);
  });

  // --- writing a part again ---

  const setPicked = (value) => {
    picked = value;
    refill.hidden = value === null;
    if (value === null) return;
    part(".refill-count").value = value.to - value.from;
    part(".refill-text").textContent = quoted(piecesOf(film).slice(value.from, value.to).join(""));
  };

  const select = (anchor, focus) => {
    const [from, to] = anchor <= focus ? [anchor, focus] : [focus, anchor];
    const range = document.createRange();
    range.setStartBefore(elements[from]);
    range.setEndAfter(elements[to]);
    getSelection().removeAllRanges();
    getSelection().addRange(range);
    if (onRefill && film.ended && at === last()) setPicked({ from, to: to + 1, anchor });
  };

  const readSelection = () => {
    const selection = getSelection();
    if (!onRefill || selection.rangeCount === 0 || !stage.contains(selection.anchorNode)) return;
    if (selection.isCollapsed || !film.ended || at !== last()) {
      if (!root.contains(document.activeElement) || document.activeElement === document.body) setPicked(null);
      return;
    }
    const range = selection.getRangeAt(0);
    const held = elements.flatMap((token, place) =>
      range.intersectsNode(token) && touches(range, token) ? [place] : [],
    );
    if (held.length > 0) {
      const anchor = placeOf(selection.anchorNode) ?? held[0];
      setPicked({ from: held[0], to: held.at(-1) + 1, anchor });
    }
  };

  /** A range that only touches a token's edge holds none of its text. */
  const touches = (range, token) => {
    const own = document.createRange();
    own.selectNodeContents(token);
    const beginsBefore = range.compareBoundaryPoints(Range.END_TO_START, own) < 0;
    return beginsBefore && range.compareBoundaryPoints(Range.START_TO_END, own) > 0;
  };

  if (onRefill) {
    document.addEventListener("selectionchange", readSelection);
    refill.addEventListener("submit", (event) => {
      event.preventDefault();
      const pieces = piecesOf(film);
      const [before, after] = [pieces.slice(0, picked.from), pieces.slice(picked.to)].map((each) => each.join(""));
      const count = Number(part(".refill-count").value);
      setPicked(null);
      onRefill(before, count, after);
    });
  }

  // --- the life of a text ---

  const start = ({ isAnswer = false } = {}) => {
    setPlaying(false);
    setPicked(null);
    cancelAnimationFrame(frame);
    [film, moments, at, first, frame, final, whole, current] = [createFilm(), [0], 0, 0, 0, null, null, -1];
    [isLive, follows, began] = [true, true, performance.now()];
    root.classList.remove("knows");
    root.classList.add("live");
    root.dataset.isAnswer = isAnswer;
    elements = [];
    stage.replaceChildren();
    detail.replaceChildren();
    status.textContent = "Writing …";
    drawCounts({ written: 0, passes: 0 }, 0);
    describePosition();
    // On a phone the text is below the form.
    stage.scrollIntoView({ block: "nearest", behavior: calm.matches ? "instant" : "smooth" });
  };

  const add = (steps, prompt) => {
    addSteps(film, steps);
    if (film.given.length > 0 && film.mended.size === 0 && prompt) {
      const given = film.given.map((piece) => piece ?? "");
      if (!film.given.includes(null)) mend(film, given, 0, prompt);
    }
    if (steps.some((step) => step[4]?.length > 0)) root.classList.add("knows"); // room for alternatives
    if (root.dataset.isAnswer === "true") first = film.given.length;
    drawSoon();
  };

  const halt = (words) => {
    isLive = false;
    root.classList.remove("live");
    status.textContent = words;
  };

  /** Show the server's final text. `before` is its given part, or null if unknown. */
  const finish = ({ text, before, usage }) => {
    const seconds = (performance.now() - began) / 1000;
    cancelAnimationFrame(frame);
    frame = 0;
    endFilm(film, usage.total_tokens);
    moments = momentsOf(film);
    film.mended = new Map(); // again, now with the whole text
    const pieces = piecesOf(film);
    mend(film, pieces, film.given.length, text);
    if (before !== null) mend(film, pieces, 0, before + text);
    final = piecesOf(film);
    whole = { written: usage.completion_tokens, passes: usage.passes, seconds };
    halt(`Finished: ${usage.completion_tokens} tokens in ${usage.passes} passes.`);
    drawCounts(whole, seconds);
    const isOneOfSeveral = film.given.includes(null) && usage.passes > usage.completion_tokens;
    if (isOneOfSeveral) detail.textContent = "Chosen from several fills by the text after it; passes count all fills.";
    if (follows) draw(last());
    else describePosition();
  };

  const fail = (words) => {
    cancelAnimationFrame(frame);
    frame = 0;
    moments = momentsOf(film);
    if (follows) draw(last());
    halt(words);
  };

  return { start, add, finish, fail, play, stepBy, toggle: () => playButton.click() };
};
