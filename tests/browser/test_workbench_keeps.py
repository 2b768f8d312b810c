"""What one wrote or saw on a page of the workbench stays there: answers, a config whose run failed, curves."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tests.browser.conftest import DATA, RUN, Served
from tests.support.wait import until

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

SERVER = {"base": "gym-nano", "status": "ready", "seconds": 1, "output": []}


def events(*parts: dict[str, object]) -> str:
    return "".join(f"data: {json.dumps(part)}\n\n" for part in parts) + "data: [DONE]\n\n"


def answer(route: Route) -> None:
    """A word, with its probability if that was asked for."""
    logprobs = {"content": [{"token": "word", "logprob": -0.1, "top_logprobs": []}]}
    asked = json.loads(route.request.post_data or "{}")["logprobs"]
    choice = {"delta": {"content": "word"}, "logprobs": logprobs if asked else None, "finish_reason": "stop"}
    route.fulfill(content_type="text/event-stream", body=events({"choices": [choice]}))


def test_answers_stay_when_probabilities_are_asked_for_later(webui: Served, page: Page) -> None:
    page.route("**/api/v1/play/serve", lambda route: route.fulfill(json={"servers": [SERVER]}))
    page.route("**/api/v1/play/chat", answer)
    page.goto(webui.url)
    page.goto(f"{webui.address}/play?a=gym-nano")
    for number, tick in enumerate((False, True), start=1):
        page.get_by_label("Show each token").set_checked(tick)
        page.locator("#prompt").fill("say a word")
        page.get_by_role("button", name="Send").click()
        page.locator(f".exchange:nth-of-type({number})").get_by_role("button", name="Teach").wait_for()
    shown = page.locator(".exchange .answer").all_inner_texts()
    assert len(shown) == 2
    assert all("word" in text.split("\n") for text in shown), shown
    page.get_by_role("button", name="Copy").first.click()
    page.get_by_role("button", name="Copied").wait_for()


def test_the_end_of_an_answer_stays_in_view_unless_the_reader_scrolls_up(webui: Served, page: Page) -> None:
    lines = [{"delta": {"content": f"line {n}\n\n"}, "finish_reason": None} for n in range(60)]
    text = events(*({"choices": [line]} for line in [*lines, {"delta": {}, "finish_reason": "stop"}]))
    held: list[Route] = []

    def hold(route: Route) -> None:
        held.append(route)

    page.route("**/api/v1/play/serve", lambda route: route.fulfill(json={"servers": [SERVER]}))
    page.route("**/api/v1/play/chat", hold)
    page.goto(webui.url)
    page.goto(f"{webui.address}/play?a=gym-nano")
    for number, scrolls_up in enumerate((False, True), start=1):
        page.locator("#prompt").fill("count")
        page.get_by_role("button", name="Send").click()
        until(lambda number=number: page.evaluate("1") and len(held) == number, "the question")
        if scrolls_up:
            page.evaluate("scrollTo(0, 0)")
        held[-1].fulfill(content_type="text/event-stream", body=text)
        page.locator(f".exchange:nth-of-type({number})").get_by_role("button", name="Teach").wait_for()
        page.locator(f".exchange:nth-of-type({number})").locator(".said p", has_text="line 59").wait_for()
        end, composer = (page.locator(css).last.bounding_box() for css in (".exchange", ".compose"))
        assert end is not None
        assert composer is not None
        assert (end["y"] + end["height"] <= composer["y"] + 60) is not scrolls_up
        assert (page.evaluate("scrollY") == 0) is scrolls_up


def test_a_loaded_model_is_unloaded_from_its_side(webui: Served, page: Page) -> None:
    asked: list[list[str]] = []

    def serve(route: Route) -> None:
        asked.append(json.loads(route.request.post_data or "{}")["bases"])
        route.fulfill(json={"servers": [SERVER] if asked[-1] else []})

    page.route("**/api/v1/play/serve", serve)
    page.goto(webui.url)
    page.goto(f"{webui.address}/play?a=gym-nano")
    page.get_by_role("button", name="Unload gym-nano").click()
    page.get_by_text("It is loaded when you choose it.").wait_for()
    assert asked == [["gym-nano"], []]
    assert page.locator("#model-0").input_value() == ""


def test_a_config_is_still_there_after_its_start(webui: Served, page: Page) -> None:
    page.goto(webui.url)
    page.goto(f"{webui.address}/train?tab=yaml")
    page.route("**/api/v1/train/start", lambda route: route.fulfill(json={"path": RUN}))
    text = f"# mine\nmodel: gym-nano\noutput_dir: runs/new\ndata:\n  - path: {DATA}\nmax_steps: 3\n"
    page.locator("#yaml").fill(text)
    page.get_by_role("button", name="Start", exact=True).click()
    page.wait_for_url("**/runs/**")
    page.get_by_role("link", name="Train", exact=True).click()
    page.locator("#problems").get_by_text("Valid").wait_for()
    assert page.locator("#yaml").input_value() == text


def test_an_adapter_is_continued_on_its_base(webui: Served, page: Page) -> None:
    page.on("dialog", lambda dialog: dialog.accept())
    one = f"**/api/v1/runs/{RUN}?*"
    page.route(one, lambda route: route.fulfill(json={**route.fetch().json(), "is_adapter": True}))
    page.goto(webui.url)
    page.goto(f"{webui.address}/runs/{RUN}")
    page.get_by_role("button", name="Continue").click()
    page.get_by_role("tab", name="YAML").click()
    until(lambda: f"adapter: runs/{RUN}\n" in page.locator("#yaml").input_value(), "the adapter")
    assert "model: gym-nano\n" in page.locator("#yaml").input_value()


def test_rows_of_a_file_are_taken_into_the_config_and_a_run_is_trained_again(
    webui: Served, page: Page
) -> None:
    page.on("dialog", lambda dialog: dialog.accept())
    page.goto(webui.url)
    page.goto(f"{webui.address}/data/{DATA}")
    page.get_by_role("link", name="Train on these rows").click()
    page.locator("#problems").get_by_text("Valid").wait_for()
    assert f"data:\n  - path: {DATA}\n" in page.locator("#yaml").input_value()
    page.goto(f"{webui.address}/runs/{RUN}")
    page.get_by_role("button", name="Train again").click()
    page.locator("#problems").get_by_text("Valid").wait_for()
    assert f"output_dir: runs/{RUN}-2\n" in page.locator("#yaml").input_value()


MARKED = (
    "# Title\n\nA **bold** `code` and [here](https://example.org/a) or [no](javascript:alert(1)).\n"
    '<img src=x onerror="document.title=1"><script>document.title=2</script>\n\n'
    '- one\n- two\n\n```py\nprint("<b>")\n```'
)


def test_markdown_of_an_answer_is_formatted_and_its_html_is_not(webui: Served, page: Page) -> None:
    page.route("**/api/v1/play/serve", lambda route: route.fulfill(json={"servers": [SERVER]}))
    parts = {"choices": [{"delta": {"content": MARKED}, "finish_reason": "stop"}]}
    page.route(
        "**/api/v1/play/chat",
        lambda route: route.fulfill(content_type="text/event-stream", body=events(parts)),
    )
    page.goto(webui.url)
    page.goto(f"{webui.address}/play?a=gym-nano")
    page.locator("#prompt").fill("first")
    page.get_by_role("button", name="Send").click()
    answer = page.locator(".answer .stack")
    answer.wait_for()
    assert answer.locator("strong").inner_text() == "bold"
    assert answer.locator("li").all_inner_texts() == ["one", "two"]
    assert answer.locator(".copyable code").inner_text() == 'print("<b>")'
    assert [link.get_attribute("href") for link in answer.locator("a").all()] == ["https://example.org/a"]
    assert answer.locator("img, script, b").count() == 0
    assert "<img src=x" in answer.inner_text()


SLOW_SAVE = """
  const send = window.fetch;
  let isHeld = false;
  window.fetch = async (url, given) => {
    if (!isHeld && given?.method === "POST" && String(url).endsWith("/play/chats")) {
      isHeld = true;
      while (!document.body.innerText.includes("2 of 2")) await new Promise((done) => setTimeout(done, 20));
    }
    return send(url, given);
  };
"""
"""A script that holds the first save of a conversation until its prompt has a second answer."""


def test_a_prompt_is_edited_asked_again_and_an_earlier_conversation_opened(webui: Served, page: Page) -> None:
    page.route("**/api/v1/play/serve", lambda route: route.fulfill(json={"servers": [SERVER]}))
    page.route("**/api/v1/play/chat", answer)
    page.add_init_script(SLOW_SAVE)
    page.goto(webui.url)
    page.goto(f"{webui.address}/play?a=gym-nano")
    page.locator("#prompt").fill("alpha")
    page.get_by_role("button", name="Send").click()
    page.get_by_role("button", name="Ask again").click()
    page.get_by_text("2 of 2").wait_for()  # the first answer stays, too
    page.get_by_role("button", name="The answer before").click()
    page.get_by_text("1 of 2").wait_for()
    page.get_by_role("button", name="Edit").click()
    assert page.locator("#prompt").input_value() == "alpha"
    page.locator("#prompt").fill("beta")
    page.get_by_role("button", name="Send").click()
    page.get_by_role("button", name="Edit").wait_for()
    assert page.locator(".asked .said").all_inner_texts() == ["beta"]
    page.get_by_role("button", name="beta", exact=True).wait_for()
    page.reload()  # kept by the workbench, not by the tab
    page.get_by_role("button", name="alpha", exact=True).click()
    page.get_by_text("1 of 2").wait_for()
    assert page.locator(".asked .said").all_inner_texts() == ["alpha"]
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete alpha").click()
    page.get_by_role("button", name="alpha", exact=True).wait_for(state="detached")


def test_the_alternatives_of_a_token_are_shown_under_the_pointer(webui: Served, page: Page) -> None:
    page.route("**/api/v1/play/serve", lambda route: route.fulfill(json={"servers": [SERVER]}))
    likely = [{"token": token, "logprob": log} for token, log in (("yes", -0.1), ("<b>no</b>", -2.4))]
    token = {**likely[0], "top_logprobs": likely}
    parts = {
        "choices": [{"delta": {"content": "yes"}, "logprobs": {"content": [token]}, "finish_reason": "stop"}]
    }
    page.route(
        "**/api/v1/play/chat",
        lambda route: route.fulfill(content_type="text/event-stream", body=events(parts)),
    )
    page.goto(webui.url)
    page.goto(f"{webui.address}/play?a=gym-nano")
    page.get_by_label("Show each token").check()
    page.locator("#prompt").fill("really?")
    page.get_by_role("button", name="Send").click()
    page.get_by_role("button", name="Ask again").wait_for()
    page.locator(".tokens .token").hover()
    card = page.locator(".token-card")
    card.wait_for()
    assert card.locator("li code").all_inner_texts() == ['"yes"', '"<b>no</b>"']
    assert card.locator("b").count() == 0
    page.mouse.move(0, 0)
    card.wait_for(state="hidden")
