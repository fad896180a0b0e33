// Two texts of one seed: what their settings do, how many passes each has taken so far, and what came of it.

const element = (kind, className, text) => {
  const made = document.createElement(kind);
  made.className = className;
  made.textContent = text;
  return made;
};

/** A line for each text, as long as the passes that it takes, and filled as far as it is shown. */
export const createRace = (root) => {
  const lanes = [];

  const draw = () => {
    const most = Math.max(...lanes.map((lane) => lane.total), 1);
    for (const lane of lanes) {
      lane.track.style.setProperty("--whole", `${(100 * lane.total) / most}%`);
      lane.bar.style.setProperty("--share", `${(100 * lane.passes) / Math.max(lane.total, 1)}%`);
      lane.count.textContent = `${lane.written} tokens in ${lane.passes} passes`;
    }
    root.classList.toggle("ran", lanes.every((lane) => lane.total > 0));
  };

  const lane = (name) => {
    const [place, track, bar] = [element("dd", "", ""), element("div", "track", ""), element("div", "bar", "")];
    const made = { written: 0, passes: 0, total: 0, track, bar, count: element("dd", "count", "") };
    track.append(bar);
    place.append(track);
    root.append(element("dt", "", name), place, made.count);
    lanes.push(made);
    const show = (written, passes, total) => {
      Object.assign(made, { written, passes, total });
      draw();
    };
    return { show };
  };

  const clear = () => {
    for (const each of lanes) Object.assign(each, { written: 0, passes: 0, total: 0 });
    draw();
  };

  return { lane, clear };
};

/** What settings do to how a text comes about, for those who have not met them. */
export const mannerOf = ({ law, speculation }, model) => {
  const own = law ?? model.law;
  if (own === "block") return "A block begins as masks. Pass by pass its tokens are uncovered, in any order.";
  if (own !== "causal") return "";
  if (speculation === undefined) return "Token after token.";
  if (speculation === "off") return "Every pass writes one token.";
  const guesses = { auto: "guesses of the next tokens", 1: "a guess of the next token" };
  const checked = guesses[speculation] ?? `${speculation} guessed tokens at once`;
  return `Every pass checks ${checked}, keeps what is right, and guesses anew.`;
};

/** What came of two texts. */
export const verdictOf = ([a, b]) => {
  const [fewer, more] = [a.usage.passes, b.usage.passes].sort((one, other) => one - other);
  if (a.text === b.text) return `The same text in ${fewer} passes${fewer < more ? ` instead of ${more}` : " each"}.`;
  const passes = fewer === more ? `${more} passes each` : `${a.usage.passes} passes and ${b.usage.passes}`;
  const signs = [...a.text];
  const others = [...b.text];
  const unlike = signs.findIndex((sign, i) => sign !== others[i]);
  const where = unlike < 0 ? signs.length : unlike;
  return `The texts differ${where > 0 ? `, after ${where} characters that are the same` : ""}; ${passes}.`;
};
