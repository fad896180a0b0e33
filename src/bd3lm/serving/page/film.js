// A film: the steps of a text being written, as the server sends them (docs/serving.md), and what each moment of it
// shows. Nothing here depends on the page.
//
// A film with drafts has a moment for each pass, which ends with its drafts, even if it has none. Any other film has a
// moment for each step: a token, or the start of a block of several tokens.

export const SETTLED = 3; // moments until a written token looks like the others

export const createFilm = () => ({ given: [], steps: [], ended: false, mended: new Map() });

export const addSteps = (film, steps) => {
  for (const step of steps) {
    if (step[0] === "given") Object.assign(film, { given: step[1], steps: [] });
    else film.steps.push(step);
  }
};

/** The film is complete. Cut off tokens that were written past the end of the text. */
export const endFilm = (film, length) => {
  const reached = film.steps.reduce((most, step) => (step[0] === "block" ? Math.max(most, step[2]) : most), 0);
  if (length !== null && Math.max(reached, film.given.length) > length) film.steps.push(["cut", length]);
  film.ended = true;
};

export const hasDrafts = (film) => film.steps.some(([kind]) => kind === "draft");

const isSeen = ([kind, start, stop]) =>
  kind === "show" || kind === "hide" || (kind === "block" && stop - start > 1);

/** The number of steps that are done at each moment. */
export const momentsOf = (film) => {
  const { steps, ended } = film;
  const isEnd = hasDrafts(film) ? ([kind]) => kind === "draft" : isSeen;
  const moments = [0, ...steps.flatMap((step, i) => (isEnd(step) ? [i + 1] : []))];
  // Steps after the last pass of a finished text belong to that pass.
  if (ended && moments.length > 1) moments.pop();
  if (moments.at(-1) < steps.length) moments.push(steps.length);
  return moments;
};

const maskSince = (since) => ({ piece: null, since });

/** The tokens at a moment, the drafts, and the block being written. */
export const stateAt = (film, moments, end) => {
  const tokens = film.given.map((piece) =>
    piece === null ? maskSince(-SETTLED) : { piece, since: -SETTLED, isGiven: true },
  );
  const blocks = [];
  const ranks = new Map(); // by a block's start: how many of its tokens are written
  let drafts = new Map();
  let now = [0, 0];
  let shown = 0;
  let moment = 0;
  for (let i = 0; i < moments[end]; i += 1) {
    const [kind, place, value, logP, others] = film.steps[i];
    while (moments[moment + 1] <= i) moment += 1;
    if (kind === "block") {
      now = [place, value];
      blocks.push(now);
      while (tokens.length < value) tokens.push(maskSince(moment));
    } else if (kind === "show") {
      shown += 1;
      const [start, stop] = now;
      const rank = ranks.get(start) ?? 0;
      ranks.set(start, rank + 1);
      const wasDrafted = drafts.get(place) === value;
      tokens[place] = { piece: value, since: moment, order: shown, rank, size: stop - start, wasDrafted, logP, others };
    } else if (kind === "hide") {
      tokens[place] = maskSince(moment);
    } else if (kind === "draft") {
      drafts = new Map(place);
    } else if (kind === "cut") {
      tokens.length = place;
      drafts = new Map();
      now = [0, 0];
    }
  }
  const open = [...drafts].filter(([place]) => (tokens[place]?.piece ?? null) === null);
  return { tokens, blocks, now, shown, drafts: new Map(open) };
};

/** The places of drafts that a moment rejects: they were wrong, or guessed differently. */
export const wrongDrafts = (before, after) =>
  [...before.drafts].flatMap(([place, piece]) => {
    const found = after.tokens[place]?.piece ?? after.drafts.get(place);
    return found === piece ? [] : [place];
  });

const countPasses = (film, steps) => {
  const kind = hasDrafts(film) ? "draft" : "show";
  return steps.filter((step) => step[0] === kind).length;
};

/** The number of passes up to a moment. */
export const passesAt = (film, moments, end) => countPasses(film, film.steps.slice(0, moments[end]));

/** Tokens and passes so far, before the server sends its counts. */
export const countsOf = (film) => {
  const moments = momentsOf(film);
  const { tokens } = stateAt(film, moments, moments.length - 1);
  const written = tokens.filter((token) => token.piece !== null && !token.isGiven).length;
  return { written, passes: countPasses(film, film.steps) };
};

/** Every token's part of the text. */
export const piecesOf = (film) => {
  const moments = momentsOf(film);
  const { tokens } = stateAt(film, moments, moments.length - 1);
  return tokens.map((token, place) => pieceAt(film, place, token.piece ?? ""));
};

// --- characters of several tokens ---

const HALF = "\ufffd";

/** The text shown for a token. A character that takes several tokens is shown at the last of them. */
export const pieceAt = (film, place, piece) => {
  const [from, text] = film.mended.get(place) ?? [];
  return from === piece ? text : piece;
};

/** Split a text among its tokens. If each token is a byte, a character goes to the token of its last byte. */
const spread = (text, count) => {
  const parts = Array.from({ length: count }, () => "");
  // The replacement character stands for one byte.
  const ends = [...text].map((sign) => (sign === HALF ? 1 : new TextEncoder().encode(sign).length));
  const bytes = ends.reduce((sum, length) => sum + length, 0);
  let at = -1;
  [...text].forEach((sign, i) => {
    at = bytes === count ? at + ends[i] : count - 1;
    parts[at] += sign;
  });
  return parts;
};

/**
 * Show tokens that are parts of characters, once the text is known. `text` is the text of all tokens from `first` on;
 * if the tokens do not match it, nothing changes.
 */
export const mend = (film, pieces, first, text) => {
  const found = new Map();
  const isPart = (piece, isLater) => piece.includes(HALF) || (isLater && piece === "");
  let at = 0;
  let place = first;
  while (place < pieces.length) {
    let after = place;
    while (after < pieces.length && isPart(pieces[after], after > place)) after += 1;
    if (after === place) {
      if (!text.startsWith(pieces[place], at)) return;
      at += pieces[place].length;
      place += 1;
      continue;
    }
    const end = after < pieces.length ? text.indexOf(pieces[after], at) : text.length;
    if (end < 0) return;
    spread(text.slice(at, end), after - place).forEach((part, i) => found.set(place + i, [pieces[place + i], part]));
    at = end;
    place = after;
  }
  film.mended = found;
};

// --- signs ---

const KEPT = "\n\t\u200c\u200d"; // joiners too: some scripts, and some emoji, need them

const sign = (character) => {
  const code = character.codePointAt(0);
  if (KEPT.includes(character)) return character;
  if (code < 0x20) return String.fromCodePoint(0x2400 + code); // visible pictures of control characters: ␀, ␛
  if (code === 0x7f) return "␡";
  if (code < 0xa0) return `\\x${code.toString(16)}`;
  return code >= 0xd800 && code < 0xe000 ? HALF : ""; // characters that change the direction of text are left out
};

/** Text in visible characters: control characters as pictures, without those that change its direction. */
export const readable = (text) => text.replaceAll("\r\n", "\n").replace(/\p{Cc}|\p{Cf}|\p{Cs}/gu, sign);
