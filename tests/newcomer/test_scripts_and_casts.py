"""The scripts of the four people, their page, and the pictures: what one has the others have."""

from __future__ import annotations

import ast
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from PIL import Image

from gym_fed.serving.openai.snippets import DEFAULT_URL, ServedModel, openai_snippet
from tests.integration.test_docs import commands_in, files_in
from tools import recording
from tools.casts.drawing import SECRETS, drawn
from tools.casts.page import FOLDER, PAGE, begin
from tools.casts.people import PEOPLE, SCRIPTS, STAYS, VARIANT_OWNER, Person
from tools.casts.terminal import Line, Terminal

MOST_BYTES = 60_000
MOST_PICTURE_BYTES = 1_500_000


def sections(person: Person) -> str:
    """What the page has under the person's headings."""
    parts = re.split(r"^## (.+)\n", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    found = dict(zip(parts[1::2], parts[2::2], strict=True))
    return "\n".join(found[heading] for heading in person.headings)


@pytest.mark.parametrize("person", PEOPLE, ids=lambda person: person.script)
def test_a_script_types_what_its_page_shows_and_nothing_else(person: Person) -> None:
    typed = [line.partition(STAYS)[0].rstrip() for line in person.commands()]
    assert typed == commands_in(sections(person))


def test_every_section_of_commands_is_somebodys() -> None:
    headings = re.findall(r"^## (.+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert {heading for person in PEOPLE for heading in person.headings} == set(headings) - {"From Python"}
    assert {file.stem for file in SCRIPTS.glob("*.sh")} == {person.script for person in PEOPLE}


def test_the_file_to_save_is_that_of_the_page_and_what_gym_api_prints() -> None:
    saved = ast.parse((SCRIPTS / "ask.py").read_text(encoding="utf-8"))
    saved.body = saved.body[1:]  # its docstring
    printed = openai_snippet(ServedModel(DEFAULT_URL, "gym-nano:me")).replace("Hello", "shout: dxec")
    assert ast.dump(ast.parse(printed)) == ast.dump(saved)
    assert {name: ast.dump(ast.parse(text)) for name, text in files_in(sections(VARIANT_OWNER)).items()} == {
        "ask.py": ast.dump(saved)
    }


@pytest.mark.parametrize("person", PEOPLE, ids=lambda person: person.script)
def test_a_cast_shows_every_command_in_greys_and_no_secret(person: Person) -> None:
    text = (FOLDER / f"{person.script}.svg").read_text(encoding="utf-8")
    assert len(text.encode()) < MOST_BYTES
    lines: dict[float, str] = {}
    for element in ElementTree.fromstring(text).iter("{http://www.w3.org/2000/svg}text"):
        lines.setdefault(float(element.attrib["y"]), "")
        lines[float(element.attrib["y"])] += element.text or ""
    shown = "".join(line.replace("\xa0", " ") for line in lines.values())
    for command in person.commands():
        assert f"$ {command.partition(STAYS)[0].rstrip()}" in shown
    assert not SECRETS.search(shown)
    assert re.findall(r"/(?:tmp|home|root|Users|work)/", shown) == []
    colours = re.findall(r"#([0-9a-f]{6})\b", text)
    assert colours
    assert [colour for colour in colours if not colour[:2] == colour[2:4] == colour[4:]] == []
    assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)\S*", re.sub(r">[^<]*</text>", "", text)) == []
    assert "prefers-reduced-motion" in text


@pytest.mark.parametrize("person", PEOPLE, ids=lambda person: person.script)
def test_the_page_shows_a_cast_with_its_text_and_seconds(person: Person) -> None:
    section = sections(person).partition(begin(person))[2]
    assert f'<img src="casts/{person.script}.svg" alt="{person.picture}">' in section
    assert re.search(rf"{len(person.commands())} commands in \d+ s, after \d+ s of installation", section)


def test_a_picture_keeps_frames_in_their_place_and_refuses_what_it_may_not_show() -> None:
    line = Line(0.5, ((f"│ data  /somewhere/my.jsonl{' ' * 51} │", False),))
    svg = drawn("one", [line], {"/somewhere": "~"})
    (shown,) = ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    assert shown.text is not None
    assert (len(shown.text), shown.text[-1]) == (len(line.text), "│")
    cut = [Line(0.1, (("in /some", False),)), Line(0.1, (("where", False),))]
    for secret in ([Line(0.1, (("gym://hub.example.org:9443/AB/CD", False),))], cut):
        with pytest.raises(ValueError, match="would show"):
            drawn("one", secret, {}, ["/somewhere"])


def test_a_terminal_answers_questions_and_keeps_what_stands_in_the_end(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, {"PATH": "/usr/bin:/bin"})
    script = (
        r"printf '1/2\r'; printf '2/2\n'; printf '\033[1mjoin?\033[0m [y/N]: '; read a; echo $a $(stty size)"
    )
    assert terminal.run(script).status == 0
    assert [line.text for line in terminal.lines()][-3:] == ["2/2", "join? [y/N]: y", "y 24 80"]
    assert terminal.lines()[-2].parts[0] == ("join?", True)
    with pytest.raises(RuntimeError, match="ended with 3"):
        terminal.run("exit 3")


def test_a_command_that_stays_ends_with_ctrl_c(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, {"PATH": "/usr/bin:/bin"})
    with terminal.type("echo serving; sleep 600") as running:
        running.wait_for("serving")
    assert running.typed.status not in (None, 0)
    with pytest.raises(RuntimeError, match="ended without"):
        terminal.type("echo other").wait_for("serving")


def test_the_recording_of_the_demo_shows_its_terminal_and_two_minutes_of_its_page() -> None:
    text = (FOLDER / "demo.svg").read_text(encoding="utf-8")
    assert not SECRETS.search(text)
    assert re.findall(r"/(?:tmp|home|root|Users|work)/", text) == []
    assert "verdicts" in text
    with Image.open(recording.PICTURE) as film:
        assert getattr(film, "n_frames", 1) > 10
        seconds = 0.0
        for number in range(film.n_frames):  # type: ignore[attr-defined]
            film.seek(number)
            film.load()  # the duration is read with the frame
            seconds += film.info["duration"] / 1000
    assert 30 <= seconds <= 120
    page = (PAGE.parent / "benchmarks.md").read_text(encoding="utf-8")
    assert "](casts/demo.svg)" in page
    assert 'src="pictures/demo.webp"' in page


def test_all_pictures_of_the_docs_are_small() -> None:
    pictures = [*recording.PICTURE.parent.iterdir()]
    assert sum(file.stat().st_size for file in pictures) < MOST_PICTURE_BYTES
