// The page itself: its form, its requests and their results. The address holds all settings, so a link shares them.
// Nothing is written before somebody presses the button.

import { createRace, mannerOf, verdictOf } from "./compare.js";
import { readable } from "./film.js";
import { chunks, hasKey, keepKey, model as askModel } from "./server.js";
import { createView } from "./view.js";

const find = (id) => document.getElementById(id);
const [prompt, seed, maxTokens, fills, compare] = ["prompt", "seed", "max_tokens", "fills", "compare"].map(find);
const LONGEST_LINK = 6000; // characters of a prompt that fit into an address

let model = null;
let running = null; // aborts the running requests
let messages = []; // of the conversation
let turns = []; // their views
const prompts = { write: prompt.value, fill: "The river{6} in the north of the town.", chat: "" };
let shownMode = "write";

const modeNow = () => document.querySelector("input[name=mode]:checked").value;

const setHidden = (id, isHidden) => {
  find(id).hidden = isHidden;
};

const complain = (error) => {
  setHidden("error", error === null);
  find("error").textContent = error === null ? "" : readable(error.message);
};

// --- panes ---

const viewIn = (place, options) => {
  place.append(find("view-template").content.cloneNode(true));
  return createView(place, options);
};

const createPane = (name) => {
  const root = find("pane-template").content.firstElementChild.cloneNode(true);
  root.querySelector(".pane-name").textContent = name;
  root.setAttribute("aria-label", `Text ${name}`);
  root.dataset.pane = name.toLowerCase();
  find("panes").append(root);
  const lane = race.lane(name);
  const view = viewIn(root.querySelector(".view"), { name, onRefill: (...parts) => refill(parts), onMoment: lane.show });
  const fields = Object.fromEntries([...root.querySelectorAll("[data-name]")].map((each) => [each.dataset.name, each]));
  return { name, root, view, fields };
};

const race = createRace(find("race"));
const panes = [createPane("A"), createPane("B")];
const isComparing = () => compare.checked && modeNow() !== "chat";
const panesNow = () => (isComparing() ? panes : panes.slice(0, 1));

/** Set a field from the address, if the value is valid. */
const fill = (field, value) => {
  if (field.type === "number" && !Number.isFinite(Number(value))) return;
  field.value = value;
  if (field.selectedIndex === -1) field.selectedIndex = 0; // no such option
};

const setField = (pane, name, value) => fill(pane.fields[name], value);

/** The settings that have an effect under the law of a pane. */
const meansOf = (pane) => model?.means?.[pane.fields.law.value] ?? [];

/** Show only the settings that have an effect for the model. */
const showFields = (pane) => {
  const means = meansOf(pane);
  const isMeant = {
    law: (model?.laws.length ?? 0) > 1,
    lean: means.includes("lean"),
    speculation: means.includes("speculation"),
  };
  for (const [name, isShown] of Object.entries(isMeant)) {
    pane.root.querySelector(`[data-field=${name}]`).hidden = !isShown;
  }
  pane.root.querySelector(".manner").textContent = model === null ? "" : mannerOf(settingsOf(pane), model);
};

const numberOf = (field) => (field.value.trim() === "" ? undefined : Number(field.value));

/** The visible, filled-in settings of a pane. The model has defaults for the others. */
const settingsOf = (pane) => {
  const found = {};
  for (const [name, field] of Object.entries(pane.fields)) {
    const isShown = !field.closest("[data-field]")?.hidden;
    const isWord = name === "law" || ["off", "auto"].includes(field.value);
    const value = field.value.trim() !== "" && isWord ? field.value : numberOf(field);
    if (isShown && value !== undefined) found[name] = value;
  }
  return found;
};

const lawWithGuesses = () => model?.laws.find((each) => each === "causal" && model.means[each].includes("speculation"));

let before = null; // the first pane's settings from before the comparison

const valuesOf = (pane) => Object.entries(pane.fields).map(([name, field]) => [name, field.value]);

/** Two settings worth comparing: without and with speculation, if the model has it. */
const contrast = () => {
  const [a, b] = panes;
  before ??= valuesOf(a);
  for (const name of Object.keys(a.fields)) b.fields[name].value = a.fields[name].value;
  const law = lawWithGuesses();
  if (law !== undefined) panes.forEach((pane) => setField(pane, "law", law));
  if (meansOf(a).includes("speculation")) {
    setField(a, "speculation", "off");
    setField(b, "speculation", "3");
  }
};

const endContrast = () => {
  for (const [name, value] of before ?? []) setField(panes[0], name, value);
  before = null;
};

/** Show what speculation gains with one press: write a text without it and with it, then play both. */
const showWhy = async () => {
  if (running) return;
  setMode("write");
  compare.checked = true;
  contrast();
  showMode();
  if (await write()) playBoth();
};

const playBoth = () => panes.forEach((pane) => pane.view.play(0));

// --- asking ---

const ALTERNATIVES = 5; // other likely tokens to ask for, if the model reports them

const askedOf = (pane, mode) => {
  const shared = { seed: Number(seed.value), ...settingsOf(pane) };
  if (meansOf(pane).includes("alternatives")) shared.alternatives = ALTERNATIVES;
  if (mode === "chat") return { messages, max_tokens: numberOf(maxTokens), ...shared };
  if (mode === "fill") return { template: prompt.value, fills: numberOf(fills), ...shared };
  return { prompt: prompt.value, max_tokens: numberOf(maxTokens), ...shared };
};

const read = async (view, mode, body, signal) => {
  const path = mode === "chat" ? "v1/chat/completions" : "v1/completions";
  const before = { write: body.prompt, fill: "", chat: null }[mode];
  let text = "";
  let usage = null;
  for await (const chunk of chunks(path, body, signal)) {
    usage = chunk.usage ?? usage;
    for (const choice of chunk.choices) {
      text += choice.delta ? (choice.delta.content ?? "") : choice.text;
      if (choice.events?.length > 0) view.add(choice.events, mode === "write" ? body.prompt : null);
    }
  }
  view.finish({ text, before, usage });
  return { text, usage };
};

/** Write a text into a view. Returns null if it was not finished. */
const writeInto = async (view, mode, body, signal) => {
  view.start({ isAnswer: mode === "chat" });
  try {
    return await read(view, mode, body, signal);
  } catch (error) {
    if (error.name === "AbortError") {
      view.fail("Stopped.");
    } else {
      view.fail("Not written.");
      if (error.status === 401) askForKey();
      complain(error);
    }
    return null;
  }
};

const setRunning = (controller) => {
  running = controller;
  setHidden("stop", controller === null);
  setHidden("write", controller !== null);
};

const stop = () => running?.abort();

/** Write everything that was asked for. Returns whether all of it was finished. */
const write = async () => {
  if (running) return false;
  if (seed.value.trim() === "") newSeed();
  complain(null);
  keepAddress();
  const controller = new AbortController();
  const hadFocus = document.activeElement === find("write");
  setRunning(controller);
  if (hadFocus) find("stop").focus();
  try {
    return await (modeNow() === "chat" ? sayInChat : writeTexts)(controller.signal);
  } finally {
    const isOnStop = document.activeElement === find("stop");
    setRunning(null);
    if (isOnStop) find("write").focus();
  }
};

const writeTexts = async (signal) => {
  const mode = modeNow();
  const shown = panesNow();
  find("verdict").textContent = "Writing both …";
  race.clear();
  const found = await Promise.all(shown.map((pane) => writeInto(pane.view, mode, askedOf(pane, mode), signal)));
  const isWhole = !found.includes(null);
  if (shown.length > 1) find("verdict").textContent = isWhole ? verdictOf(found) : "One of the texts is not finished.";
  return isWhole;
};

// --- conversation ---

const bubble = (who, className) => {
  const made = document.createElement("article");
  made.className = `bubble ${className}`;
  const title = document.createElement("h2");
  title.textContent = who;
  made.append(title);
  find("conversation").append(made);
  return made;
};

const sayInChat = async (signal) => {
  const said = prompt.value;
  if (said.trim() === "") return false;
  const asked = bubble("You", "card from-you");
  const words = document.createElement("p");
  words.textContent = readable(said);
  asked.append(words);
  const answer = bubble(model.name, "card from-model");
  const place = document.createElement("div");
  answer.append(place);
  const view = viewIn(place, { name: `answer ${turns.length + 1}` });
  turns.push(view);
  messages.push({ role: "user", content: said });
  prompt.value = "";
  const found = await writeInto(view, "chat", askedOf(panes[0], "chat"), signal);
  if (found !== null) {
    messages.push({ role: "assistant", content: found.text });
    return true;
  }
  // An unanswered message leaves the conversation and returns to the field.
  messages.pop();
  if (prompt.value === "") prompt.value = said;
  return false;
};

const forget = () => {
  stop();
  messages = [];
  turns = [];
  find("conversation").replaceChildren();
  prompt.focus();
};

// --- gaps ---

const escaped = (text) => text.replaceAll("{", "{{").replaceAll("}", "}}");

const setMode = (mode) => {
  const field = document.querySelector(`input[name=mode][value=${mode}]`);
  if (field.closest("label").hidden) return;
  field.checked = true;
  showMode();
};

/** Insert a gap at the cursor or in place of the selection. It takes the space before it, as tokens do. */
const makeGap = () => {
  const { value, selectionStart, selectionEnd } = prompt;
  const isTemplate = modeNow() === "fill";
  const same = isTemplate ? (text) => text : escaped;
  const before = same(value.slice(0, selectionStart)).replace(/ $/, "");
  const template = `${before}{${find("gap-count").value}}${same(value.slice(selectionEnd))}`;
  if (!isTemplate) setMode("fill");
  prompt.value = template;
  prompt.focus();
  const cursor = template.length - same(value.slice(selectionEnd)).length;
  prompt.setSelectionRange(cursor, cursor);
  keepAddress();
};

const refill = ([before, count, after]) => {
  setMode("fill");
  prompt.value = `${escaped(before)}{${count}}${escaped(after)}`;
  write();
};

// --- the form ---

const WORDS = {
  write: ["Prompt", "Write"],
  fill: ["Text with gaps: {6} is a gap of six tokens; write {{ and }} for braces", "Fill"],
  chat: ["Message", "Send"],
};

const showMode = () => {
  const mode = modeNow();
  if (mode !== shownMode) {
    prompts[shownMode] = prompt.value;
    prompt.value = prompts[mode];
    shownMode = mode;
  }
  const [label, button] = WORDS[mode];
  find("prompt-label").textContent = label;
  find("write").textContent = button;
  setHidden("gap", mode === "chat");
  setHidden("max-tokens-field", mode === "fill");
  setHidden("fills-field", mode !== "fill");
  setHidden("compare-field", mode === "chat");
  setHidden("conversation", mode !== "chat");
  setHidden("forget", mode !== "chat");
  setHidden("comparison", !isComparing());
  document.body.dataset.mode = mode;
  find("panes").classList.toggle("two", isComparing());
  panes[1].root.hidden = !isComparing();
  panes.forEach(showFields);
};

const newSeed = () => {
  seed.value = Math.floor(Math.random() * 1_000_000);
};

const short = (count) => {
  if (count >= 1e9) return `${(count / 1e9).toFixed(1)} B`;
  return count >= 1e6 ? `${(count / 1e6).toFixed(1)} M` : count.toLocaleString("en");
};

const showModel = () => {
  const { name, method, parameters, dtype, device } = model;
  const facts = [name, method, `${short(parameters)} parameters`, `${dtype} on ${device}`];
  find("model").textContent = readable(facts.join(" · "));
  document.title = `${readable(name)} · bd3lm`;
  setHidden("mode-chat", !model.chats);
  setHidden("show-why", lawWithGuesses() === undefined);
  for (const { fields } of panes) {
    fields.law.replaceChildren(...model.laws.map((law) => new Option(law, law, law === model.law, law === model.law)));
  }
};

const askForKey = () => {
  document.body.dataset.locked = "yes";
  setHidden("key", false);
  find("key-value").focus();
};

const load = async () => {
  try {
    model = await askModel();
  } catch (error) {
    const isFirst = error.status === 401 && !hasKey();
    if (error.status === 401) askForKey();
    complain(isFirst ? null : error); // the first time, nobody has entered a wrong key
    return;
  }
  complain(null);
  delete document.body.dataset.locked;
  setHidden("key", true);
  showModel();
  readAddress();
};

// --- the address ---

const SHARED = { prompt, seed, max_tokens: maxTokens, fills };

const keepAddress = () => {
  const found = new URLSearchParams({ mode: modeNow() });
  for (const [name, field] of Object.entries(SHARED)) {
    if (field.value !== "" && field.value.length <= LONGEST_LINK) found.set(name, field.value);
  }
  if (compare.checked) found.set("compare", "1");
  for (const pane of panesNow()) {
    for (const [name, value] of Object.entries(settingsOf(pane))) found.set(`${pane.root.dataset.pane}.${name}`, value);
  }
  history.replaceState(null, "", `#${found}`);
};

const readAddress = () => {
  const found = new URLSearchParams(location.hash.slice(1));
  const mode = found.get("mode");
  if (mode in WORDS) setMode(mode);
  for (const [name, field] of Object.entries(SHARED)) {
    if (found.has(name)) fill(field, found.get(name));
  }
  compare.checked = found.get("compare") === "1";
  if (mode !== null) {
    for (const pane of panes) {
      for (const name of Object.keys(pane.fields)) {
        const value = found.get(`${pane.root.dataset.pane}.${name}`);
        if (value !== null) setField(pane, name, value);
        else if (name !== "law") setField(pane, name, "");
      }
    }
  }
  showMode();
};

const share = async () => {
  keepAddress();
  const button = find("share");
  try {
    await navigator.clipboard.writeText(location.href);
    button.textContent = "Copied";
  } catch {
    button.textContent = "See the address bar"; // browsers allow copying only on secure connections
  }
  setTimeout(() => {
    button.textContent = "Copy link";
  }, 2000);
};

// --- input ---

const isField = (target) => target.closest?.("input, textarea, select, button, a, .stage") ?? null;

/** Keys outside of fields play all visible texts. */
const onKey = (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const onOwn = event.target.closest?.(".transport .play");
  if (isField(event.target) && !onOwn) return;
  const views = modeNow() === "chat" ? turns.slice(-1) : panesNow().map((pane) => pane.view);
  const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (move !== undefined) views.forEach((view) => view.stepBy(move));
  else if (event.key === " " && !onOwn) views.forEach((view) => view.toggle());
  else return;
  event.preventDefault();
};

const onPromptKey = (event) => {
  const isSend = event.key === "Enter" && (event.ctrlKey || event.metaKey || (modeNow() === "chat" && !event.shiftKey));
  if (!isSend || event.isComposing) return;
  event.preventDefault();
  find("ask").requestSubmit();
};

find("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  write();
});
find("key").addEventListener("submit", (event) => {
  event.preventDefault();
  keepKey(find("key-value").value);
  load();
});
find("stop").addEventListener("click", stop);
find("forget").addEventListener("click", forget);
find("share").addEventListener("click", share);
find("make-gap").addEventListener("click", makeGap);
find("new-seed").addEventListener("click", () => {
  newSeed();
  keepAddress();
});
find("play-both").addEventListener("click", playBoth);
find("show-why").addEventListener("click", showWhy);
find("modes").addEventListener("change", showMode);
compare.addEventListener("change", () => {
  if (compare.checked) contrast();
  else endContrast();
  showMode();
});
find("panes").addEventListener("change", () => {
  panes.forEach(showFields);
  keepAddress();
});
find("ask").addEventListener("change", keepAddress);
prompt.addEventListener("keydown", onPromptKey);
addEventListener("keydown", onKey);
addEventListener("hashchange", readAddress);

const narrow = matchMedia("(max-width: 36rem)");
const openSettings = () => panes.forEach(({ root }) => {
  root.querySelector(".settings").open = !narrow.matches;
});
narrow.addEventListener("change", openSettings);

openSettings();
showMode();
load();
