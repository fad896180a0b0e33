"""The page of a server as somebody uses it in chromium: no text is taken for code, and all is counted as the
server counts it."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

import httpx
import pytest

from tests.serving import Server, serving, small_model

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

DESKTOP, PHONE, NARROW = (1280, 800), (390, 844), (360, 740)
INJECTION = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>&amp;\x1b[31m{ü}"
KEY = "a key of the test"
Opened = Callable[..., "Page"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served") / "small"
    small_model().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serving(folder) as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    sync = pytest.importorskip("playwright.sync_api")
    program = shutil.which("chromium")
    assert program is not None, "chromium must be installed; make test-browser does it"
    with sync.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def opened(browser: "Browser", server: Server) -> Iterator[Opened]:
    """Opens the page; at the end no page has complained in its console."""
    contexts: list[Any] = []
    complaints: list[str] = []

    def opened(
        address: str = "/", *, size: tuple[int, int] = DESKTOP, at: Server = server, **how: Any
    ) -> "Page":
        ready, tells = how.pop("ready", True), how.pop("alternatives", False)
        context = browser.new_context(viewport={"width": size[0], "height": size[1]}, **how)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(30_000)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "console",
            lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None,
        )
        if tells:
            page.route("**/v1/models", with_alternatives)
        page.goto(at.url + address)
        if ready:
            page.wait_for_selector("#model:has-text('small')")
        return page

    opened.complaints = complaints  # type: ignore[attr-defined]
    yield opened
    for context in contexts:
        context.close()
    assert complaints == []


def with_alternatives(route: Any) -> None:
    """The models, as a server tells them that knows of alternatives of tokens."""
    answer = route.fetch()
    found = answer.json()
    for means in found["data"][0]["bd3lm"]["means"].values():
        means.append("alternatives")
    route.fulfill(response=answer, json=found)


def write(page: "Page", **fields: Any) -> None:
    """Fill in fields by their ids, press the button, and wait for the end."""
    for name, value in fields.items():
        page.fill(f"#{name}", str(value))
    page.click("#write")
    page.wait_for_selector("#write:visible")


def stage(page: "Page", pane: str = "a") -> str:
    """The text that is seen, without what only keeps its room."""
    seen: str = page.eval_on_selector_all(
        f"[data-pane={pane}] .stage .token:not(.later, .mask, .draft)",
        "tokens => tokens.map(token => token.textContent).join('')",
    )
    return seen


def counted(page: "Page", name: str, pane: str = "a") -> str:
    found = page.text_content(f"[data-pane={pane}] .count-{name}")
    assert found is not None
    return found


def seek(page: "Page", moment: int, pane: str = "a") -> None:
    page.eval_on_selector(
        f"[data-pane={pane}] .slider",
        "(slider, to) => { slider.value = to; slider.dispatchEvent(new Event('input')); }",
        moment,
    )


@pytest.mark.parametrize("size", [DESKTOP, PHONE, NARROW], ids=["desktop", "phone", "narrow"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_text_is_written_and_counted(
    opened: Opened, server: Server, size: tuple[int, int], scheme: str
) -> None:
    page = opened(size=size, color_scheme=scheme)
    write(page, prompt="ab", max_tokens=24, seed=3)
    body = {"prompt": "ab", "max_tokens": 24, "seed": 3, "temperature": 0.6}
    told = server.post(**body).json()
    assert stage(page) == "ab" + readable(told["choices"][0]["text"])
    assert counted(page, "tokens") == str(told["usage"]["completion_tokens"])
    assert counted(page, "passes") == str(told["usage"]["passes"])
    assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
    paper = page.evaluate("getComputedStyle(document.querySelector('.card')).backgroundColor")
    assert paper == {"light": "rgb(255, 255, 255)", "dark": "rgb(29, 32, 36)"}[scheme]


def readable(text: str) -> str:
    from bd3lm.reports.readable import readable

    return readable(text)


def test_tokens_appear_while_they_are_written(opened: Opened) -> None:
    page = opened()
    page.evaluate(
        """() => {
            window.lengths = new Set();
            new MutationObserver(() => {
                const shown = document.querySelectorAll('[data-pane=a] .token:not(.mask, .draft)');
                window.lengths.add(shown.length);
            }).observe(document.querySelector('[data-pane=a] .stage'), {childList: true, subtree: true});
        }"""
    )
    write(page, prompt="ab", max_tokens=300, seed=1)
    assert page.evaluate("window.lengths.size") > 3


def test_a_text_is_played_back_step_by_step(opened: Opened) -> None:
    page = opened("#mode=write&prompt=ab&a.law=block")
    write(page, max_tokens=16, seed=2)
    whole = stage(page)
    steps = int(page.get_attribute("[data-pane=a] .slider", "max") or 0)
    seek(page, 0)
    assert stage(page) == "ab"
    page.focus("[data-pane=a] .play")
    for _ in range(4):
        page.keyboard.press("ArrowRight")
    assert page.text_content("[data-pane=a] .position") == f"step 4 of {steps}"
    assert page.locator("[data-pane=a] .stage .mask").count() >= 1
    assert page.locator("[data-pane=a] .stage .fresh").count() == 1
    page.keyboard.press("ArrowLeft")
    assert page.text_content("[data-pane=a] .position") == f"step 3 of {steps}"
    page.select_option("[data-pane=a] .speed", "40")
    page.click("[data-pane=a] .play")
    assert page.text_content("[data-pane=a] .play") == "Pause"
    page.wait_for_selector("[data-pane=a] .play:has-text('Play')")
    assert stage(page) == whole
    assert page.locator("[data-pane=a] .stage .mask").count() == 0
    assert page.locator("[data-pane=a] .stage .edge").count() >= 3


def test_two_settings_of_one_seed_are_compared(opened: Opened) -> None:
    page = opened(reduced_motion="reduce")
    page.check("#compare")
    page.fill("[data-pane=a] [data-name=temperature]", "0")
    page.fill("[data-pane=b] [data-name=temperature]", "0")
    write(page, prompt="ab", max_tokens=60, seed=1)
    assert stage(page) == stage(page, "b")
    passes, fewer = (counted(page, "passes", pane) for pane in "ab")
    assert int(fewer) < int(passes) == 60
    assert page.text_content("#verdict") == f"The same text in {fewer} passes instead of {passes}."
    seek(page, 3, "b")
    assert page.locator("[data-pane=b] .stage .draft").count() >= 1
    page.select_option("[data-pane=b] [data-name=law]", "block")
    page.fill("[data-pane=a] [data-name=temperature]", "1")
    write(page)
    assert "The texts differ" in (page.text_content("#verdict") or "")


def race(page: "Page") -> list[str]:
    return page.locator("#race .count").all_text_contents()


def test_one_press_shows_why_guessing_is_faster(opened: Opened) -> None:
    """Both are played at one pace; lines as long as their passes fill, and what is counted runs along."""
    page = opened(reduced_motion="reduce")
    page.select_option("[data-pane=a] [data-name=law]", "block")
    assert page.text_content("[data-pane=a] .manner") == (
        "A block begins as masks. Each pass reveals some of its tokens, in any order."
    )
    page.fill("[data-pane=a] [data-name=temperature]", "0")
    page.fill("#max_tokens", "60")
    assert not page.is_visible("#race")
    page.click("#show-why")
    page.wait_for_selector("#verdict:has-text('The same text')")
    page.wait_for_selector("[data-pane=a] .play:has-text('Pause')")
    assert page.text_content("[data-pane=a] .manner") == "Every pass writes one token."
    lengths = page.eval_on_selector_all("#race .track", "all => all.map(track => track.offsetWidth)")
    fewer = int(page.get_attribute("[data-pane=b] .slider", "max") or 0)
    assert lengths[1] / lengths[0] == pytest.approx(fewer / 60, abs=0.02)
    for pane in "ab":
        seek(page, 20, pane)
    tokens = counted(page, "tokens", "b")
    assert int(tokens) > 20 == int(counted(page, "passes", "b"))
    assert race(page) == ["20 tokens in 20 passes", f"{tokens} tokens in 20 passes"]
    seek(page, 60)
    seek(page, fewer, "b")
    assert race(page) == ["60 tokens in 60 passes", f"60 tokens in {fewer} passes"]
    bars = page.eval_on_selector_all("#race .bar", "all => all.map(bar => bar.offsetWidth)")
    assert bars == lengths
    page.uncheck("#compare")  # what was set before
    assert page.input_value("[data-pane=a] [data-name=law]") == "block"


def test_settings_of_a_phone_are_folded_away(opened: Opened) -> None:
    page = opened(size=PHONE)
    assert not page.is_visible("[data-pane=a] [data-name=temperature]")
    page.click("[data-pane=a] .settings summary")
    page.fill("[data-pane=a] [data-name=temperature]", "0")
    page.set_viewport_size({"width": 1280, "height": 800})
    page.wait_for_selector("[data-pane=a] [data-name=temperature]")
    assert not page.is_visible("[data-pane=a] .settings summary")


def test_drafts_that_were_wrong_are_struck_for_a_moment(opened: Opened) -> None:
    page = opened("#mode=write&prompt=ab&a.law=causal&a.speculation=3")
    write(page, max_tokens=30, seed=1)
    seek(page, 0)
    page.focus("[data-pane=a] .play")
    struck = 0
    for _ in range(10):
        page.keyboard.press("ArrowRight")
        struck += page.locator("[data-pane=a] .stage .wrong").count()
        page.wait_for_selector("[data-pane=a] .stage:not(:has(.wrong))")
    assert struck > 0


def test_a_part_of_a_text_is_written_anew(opened: Opened, server: Server) -> None:
    page = opened()
    page.fill("#prompt", "one {two} three")
    page.evaluate("document.querySelector('#prompt').setSelectionRange(4, 9)")
    page.fill("#gap-count", "3")
    page.evaluate("document.querySelector('#prompt').focus()")
    page.click("#make-gap")
    assert page.input_value("#prompt") == "one{3} three"
    assert page.is_checked("input[value=fill]")
    write(page, seed=5)
    body = {"template": "one{3} three", "seed": 5, "temperature": 0.6}
    told = server.post(**body).json()
    assert stage(page) == readable(told["choices"][0]["text"])
    assert counted(page, "passes") == str(told["usage"]["passes"])
    assert counted(page, "tokens") == "3"
    # By mouse: the three that were written.
    boxes = [page.locator("[data-pane=a] .token").nth(place).bounding_box() for place in (4, 7)]
    assert boxes[0] is not None
    assert boxes[1] is not None
    page.mouse.move(boxes[0]["x"] + 1, boxes[0]["y"] + 8)
    page.mouse.down()
    page.mouse.move(boxes[1]["x"] + 1, boxes[1]["y"] + 8, steps=5)
    page.mouse.up()
    page.wait_for_timeout(200)  # a browser tells of selections a little later
    assert page.input_value("[data-pane=a] .refill-count") == "3"
    page.fill("[data-pane=a] .refill-count", "4")
    page.keyboard.press("Enter")
    page.wait_for_selector("#write:visible")
    assert page.input_value("#prompt") == "one{4} three"
    # By keys: the first token of the text, and two more.
    page.focus("[data-pane=a] .stage")
    for key in ("Home", "Shift+ArrowRight", "Shift+ArrowRight"):
        page.keyboard.press(key)
    assert page.input_value("[data-pane=a] .refill-count") == "3"
    page.fill("[data-pane=a] .refill-count", "2")
    page.click("[data-pane=a] .refill button")
    page.wait_for_selector("#write:visible")
    assert page.input_value("#prompt").startswith("{2}")
    assert page.locator("[data-pane=a] .count-tokens").text_content() == "2"


def test_an_address_shares_all_settings_and_asks_nothing(opened: Opened) -> None:
    page = opened()
    page.check("#compare")
    page.select_option("[data-pane=b] [data-name=speculation]", "2")
    page.fill("[data-pane=b] [data-name=top_p]", "0.8")
    write(page, prompt="a & b = ü\n#c", max_tokens=12, seed=9)
    texts = [stage(page, pane) for pane in "ab"]
    fields = parse_qs(page.evaluate("location.hash").removeprefix("#"))
    assert fields["prompt"] == ["a & b = ü\n#c"]
    assert fields["b.speculation"] == ["2"]
    other = opened(page.evaluate("location.pathname + location.hash"))
    assert other.input_value("#prompt") == "a & b = ü\n#c"
    assert other.input_value("[data-pane=b] [data-name=top_p]") == "0.8"
    assert stage(other) == ""  # a link makes nobody's server work
    write(other)
    assert [stage(other, pane) for pane in "ab"] == texts


def test_a_conversation(opened: Opened, server: Server) -> None:
    page = opened(size=PHONE)
    page.click("#mode-chat")
    page.fill("#max_tokens", "12")
    page.fill("#prompt", "hello <b>you</b>")
    page.keyboard.press("Enter")
    page.wait_for_selector(".from-model .status:has-text('Finished')", state="attached")
    messages = [{"role": "user", "content": "hello <b>you</b>"}]
    body = {"messages": messages, "max_tokens": 12, "seed": 1, "temperature": 0.6}
    told = server.post("/v1/chat/completions", **body).json()["choices"][0]["message"]["content"]
    seen = page.eval_on_selector_all(
        ".from-model .token", "tokens => tokens.filter(t => !t.hidden).map(t => t.textContent).join('')"
    )
    assert seen == readable(told)
    assert page.text_content(".from-you p") == "hello <b>you</b>"
    page.fill("#prompt", "again")
    page.keyboard.press("Enter")
    page.wait_for_selector(".from-model:nth-of-type(4) .status:has-text('Finished')", state="attached")
    page.click("#forget")
    assert page.locator(".bubble").count() == 0


def test_what_is_written_is_never_code(opened: Opened) -> None:
    page = opened()
    write(page, prompt=INJECTION, max_tokens=8, seed=1)
    assert readable(INJECTION) in stage(page)
    assert "␛[31m" in stage(page)
    page.check("input[value=fill]")
    page.fill("#prompt", INJECTION)  # {ü} is no gap, and the refusal quotes it
    page.click("#write")
    page.wait_for_selector("#error:visible")
    assert "<script>" in (page.text_content("#error") or "")
    assert page.evaluate("window.hacked") is None
    assert page.evaluate("document.querySelectorAll('main script, main img').length") == 0
    assert opened.complaints.pop().startswith("Failed to load resource")  # type: ignore[attr-defined]  # of a 400


def told(*steps: list[Any], text: str, passes: int) -> str:
    """An answer as a server would stream it."""
    given, written = steps[0][1], sum(step[0] == "show" for step in steps)
    chunks = [
        {"choices": [{"index": 0, "text": "", "events": list(steps)}]},
        {"choices": [{"index": 0, "text": text, "finish_reason": "length", "events": []}]},
        {
            "choices": [],
            "usage": {
                "completion_tokens": written,
                "passes": passes,
                "total_tokens": len(given) + written,
            },
        },
    ]
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


def test_a_token_tells_its_pass_and_where_known_its_probability(opened: Opened) -> None:
    page = opened(alternatives=True)
    answer = told(
        ["given", ["", "So"]],
        ["block", 2, 4],
        ["show", 3, "<script>", -0.6931, [["<script>", -0.6931], ["\x1b[0m", -9.0]]],
        ["show", 2, " it"],
        text=" it<script>",
        passes=2,
    )
    asked: list[Any] = []

    def answered(route: Any) -> None:
        asked.append(route.request.post_data_json)
        route.fulfill(body=answer, content_type="text/event-stream")

    page.route("**/v1/completions", answered)
    write(page, prompt="So")
    assert asked[0]["alternatives"] == 5
    page.hover("[data-pane=a] .token >> nth=3")
    said = page.text_content("[data-pane=a] .detail") or ""
    assert "“<script>”" in said
    assert "pass 1" in said
    assert "probability 50 %" in said
    assert page.locator("[data-pane=a] .others li").all_text_contents() == ["“<script>”50 %", "“␛[0m”< 0.1 %"]
    page.hover("[data-pane=a] .token >> nth=2")
    said = page.text_content("[data-pane=a] .detail") or ""
    assert "pass 2" in said
    assert "probability" not in said


def test_characters_of_several_tokens_are_whole_at_the_end(opened: Opened) -> None:
    page = opened()
    half = "\ufffd"
    answer = told(
        ["given", ["", "a"]],
        ["block", 2, 6],
        *(["show", place, half] for place in (3, 2, 5, 4)),
        ["block", 6, 7],
        ["show", 6, "!"],
        text="üé!",
        passes=5,
    )
    page.route(
        "**/v1/completions", lambda route: route.fulfill(body=answer, content_type="text/event-stream")
    )
    write(page, prompt="a")
    assert stage(page) == "aüé!"
    assert page.locator("[data-pane=a] .token").all_text_contents() == ["", "a", "", "ü", "", "é", "!"]


def test_a_key_is_asked_for_and_kept_as_long_as_the_tab(folder: Path, opened: Opened) -> None:
    with serving(folder, BD3LM_API_KEY=KEY) as server:
        page = opened(at=server, ready=False)
        page.wait_for_selector("#key:visible")
        page.fill("#key-value", KEY)
        page.keyboard.press("Enter")
        page.wait_for_selector("#model:has-text('small')")
        write(page, prompt="ab", max_tokens=4)
        assert counted(page, "tokens") == "4"
        assert page.evaluate("[localStorage.length, document.cookie, location.href.includes('key')]") == [
            0,
            "",
            False,
        ]
        assert opened.complaints.pop().startswith("Failed to load resource")  # type: ignore[attr-defined]  # the 401


def test_a_server_that_is_gone_is_said(folder: Path, opened: Opened) -> None:
    with serving(folder) as server:
        page = opened(at=server)
        server.stop()
        page.click("#write")
        page.wait_for_selector("#error:visible")
        assert page.text_content("#error") == "The server does not answer."
        assert page.is_visible("#write")
        with pytest.raises(httpx.ConnectError):
            server.post(prompt="ab")
        opened.complaints.clear()  # type: ignore[attr-defined]


def test_a_text_is_stopped(opened: Opened, server: Server) -> None:
    page = opened()
    page.fill("#max_tokens", "4000")
    page.click("#write")
    page.wait_for_selector("[data-pane=a] .token >> nth=9")
    page.click("#stop")
    page.wait_for_selector("#write:visible")
    assert page.text_content("[data-pane=a] .status") == "Stopped."
    server.until(20, lambda: server.texts() == 0)


def test_every_field_has_a_name_and_status_is_said_once(opened: Opened) -> None:
    page = opened()
    nameless = page.evaluate(
        """() => [...document.querySelectorAll('input, select, textarea, button')]
            .filter(field => !(field.labels?.length || field.textContent.trim() || field.ariaLabel))
            .map(field => field.outerHTML)"""
    )
    assert nameless == []
    assert page.evaluate("document.querySelector('.stage').closest('[aria-live], [role=status]')") is None
    write(page, prompt="ab", max_tokens=10)
    assert page.text_content("[data-pane=a] .status") == "Finished: 10 tokens in 10 passes."
