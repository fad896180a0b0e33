// Compares two texts with one seed: what their settings do, the passes of each so far, and the result.

const element = (kind, className, text) => {
  const made = document.createElement(kind);
  made.className = className;
  made.textContent = text;
  return made;
};

/** A bar for each text: its length is the number of passes, and it fills up as the text is played. */
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

/** A sentence on how a text is written under these settings. */
export const mannerOf = ({ law, speculation }, model) => {
  const own = law ?? model.law;
  if (own === "block") return "A block begins as masks. Each pass reveals some of its tokens, in any order.";
  if (own !== "causal") return "";
  if (speculation === undefined) return "Token by token.";
  if (speculation === "off") return "Every pass writes one token.";
  const guesses = { auto: "guessed tokens together", 1: "one guessed token" };
  const checked = guesses[speculation] ?? `${speculation} guessed tokens together`;
  return `Every pass checks ${checked}, keeps the correct ones, and guesses again.`;
};

/** The result for two texts. */
export const verdictOf = ([a, b]) => {
  const [fewer, more] = [a.usage.passes, b.usage.passes].sort((one, other) => one - other);
  if (a.text === b.text) return `The same text in ${fewer} passes${fewer < more ? ` instead of ${more}` : " each"}.`;
  const passes = fewer === more ? `${more} passes each` : `${a.usage.passes} and ${b.usage.passes} passes`;
  const signs = [...a.text];
  const others = [...b.text];
  const unlike = signs.findIndex((sign, i) => sign !== others[i]);
  const where = unlike < 0 ? signs.length : unlike;
  return `The texts differ${where > 0 ? ` after ${where} equal characters` : ""}: ${passes}.`;
};
