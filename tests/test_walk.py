"""The files of users' folders: what is taken, in which order, and that nothing is left out without a word."""

from __future__ import annotations

import gzip
import os
import socket
import unicodedata
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hvdkit.checkpoint import snapshots
from hvdkit.checkpoint.resume import check_classes
from hvdkit.core.step_plan import Progress
from hvdkit.data import imagefolder, tokens, walk
from hvdkit.data.batches import open_dataset
from hvdkit.data.dataset import Preprocessing
from hvdkit.errors import RequestError
from hvdkit.recipe.data import Text
from hvdkit.recipe.schema import ImageFolder
from tests.conftest import Hvdkit

pytestmark = pytest.mark.check
COMPOSED, SPLIT = (unicodedata.normalize(form, "café") for form in ("NFC", "NFD"))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tokens.open_tokens.cache_clear()
    yield
    tokens.open_tokens.cache_clear()


def draw(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        Image.new("RGB", (9, 9)).save(folder / name)
    return folder


def wanted(path: Path) -> ImageFolder:
    return ImageFolder(name="imagefolder", path=str(path), size=16)


def odd(folder: Path) -> Path:
    """Three pictures, and one or two of everything that is none."""
    draw(folder, "b.PNG", "a.jpg", "c.jpeg", ".hidden.png", "Thumbs.db.png")
    draw(folder / "2024" / "may", "x.png", "y.png", ".z.png")
    draw(folder / ".git", "no.png")
    draw(folder / "__MACOSX", "no.png")
    (folder / "Thumbs.db.png").rename(folder / "Thumbs.db")
    (folder / "gone.png").symlink_to("nowhere.png")
    (folder / "round.png").symlink_to("round.png")
    (folder / "linked").symlink_to("2024")
    os.mkfifo(folder / "pipe.png")
    (folder / "notes.TXT").write_text("no")
    (folder / "e.webp").write_text("no")
    return folder


def test_pictures_are_taken_and_all_others_counted_by_reason(tmp_path: Path) -> None:
    left_out: Counter[str] = Counter()
    assert walk.pictures(odd(tmp_path / "cat"), (".jpg", ".jpeg", ".png"), left_out) == ["a.jpg", "b.PNG", "c.jpeg"]
    line = walk.line("cat", left_out)
    assert line == (
        "cat: 8 files left out: 2 in nested folders, 1 .txt, 1 .webp (convert them to PNG), 1 FIFO, socket or device, "
        "1 dangling link, 1 link to a folder, 1 loop of links; pictures are taken from a class's own folder: move them "
        "up"
    )
    assert walk.line("cat", Counter()) is None


def test_what_is_left_out_is_said_where_a_command_begins(tmp_path: Path, inside: Hvdkit) -> None:
    for name in ("cat", "dog"):
        draw(tmp_path / "photos" / name, *(f"{number}.png" for number in range(20)))
    draw(tmp_path / "photos" / "cat" / "2024", *(f"{number}.png" for number in range(30)))
    (tmp_path / "photos" / "labels.csv").touch()
    draw(tmp_path / "photos" / ".ipynb_checkpoints", "no.png")
    line = "photos: 31 files left out: 30 in nested folders, 1 beside the class folders"
    done = inside("train", "resnet20-folder", "--framework", "pytorch", "--dry-run", "data.path=photos")
    assert done.returncode == 0, done.stderr
    assert line in done.stdout and "photos: 2 classes (cat, dog); 32 images for training, 8" in done.stderr
    dataset = open_dataset(wanted(tmp_path / "photos"), 2, 1)
    assert len(dataset.train) + len(dataset.val) == 40 and dataset.left_out[0].startswith(f"{tmp_path}/{line}")


def test_a_class_is_its_name_in_every_unicode_form(tmp_path: Path) -> None:
    for part, name in (("train", COMPOSED), ("val", SPLIT)):
        draw(tmp_path / part / name, "1.png", "2.png")
        draw(tmp_path / part / "zoo", "1.png")
    dataset = open_dataset(wanted(tmp_path), 2, 1)
    assert (len(dataset.train), len(dataset.val)) == (3, 3)
    assert dataset.preprocessing is not None and dataset.preprocessing.class_names == (COMPOSED, "zoo")
    assert dataset.val.batch(np.arange(3)).targets.tolist() == [0, 0, 1]
    old = Preprocessing((SPLIT, "zoo"), 16, (0.0,), (1.0,))
    record = snapshots.CheckpointRecord(
        progress=Progress(), np=1, framework="", framework_version="", hvdkit_version="", recipe={}, preprocessing=old
    )
    check_classes(record, dataset)
    draw(tmp_path / "train" / SPLIT, "1.png")
    with pytest.raises(
        RequestError, match=r"train: the folders 'cafe\\u0301' and 'caf\\xe9' have the same name, 'café'"
    ):
        imagefolder.look(wanted(tmp_path), 1)


def test_the_order_is_that_of_bytes(tmp_path: Path) -> None:
    names = ["a.png", "B.png", "ä.png", "z.png", "\U0001f600.png", "\uff5e.png", "1.png"]
    draw(tmp_path / "cat", *names)
    (tmp_path / "cat" / "z.png").rename(os.fsdecode(os.fsencode(tmp_path / "cat") + b"/\xff.png"))
    found = walk.pictures(tmp_path / "cat", (".png",), Counter())
    assert [os.fsencode(name) for name in found] == sorted(
        os.fsencode(path.name) for path in (tmp_path / "cat").iterdir()
    )


@pytest.mark.parametrize("names", [("a", "new\nline", " a", "A"), ("train", "b,c", '"quoted"', "%(x)s")])
def test_class_folders_may_have_any_name(names: tuple[str, ...], tmp_path: Path, inside: Hvdkit) -> None:
    for name in names:
        draw(tmp_path / "photos" / name, *(f"{number}.png" for number in range(12)))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "photos" / names[0]).rename(tmp_path / "elsewhere" / "x")
    (tmp_path / "photos" / names[0]).symlink_to(tmp_path / "elsewhere" / "x")
    assert imagefolder.look(wanted(tmp_path / "photos"), 1).classes == sorted(names)
    done = inside("train", "resnet20-folder", "--framework", "pytorch", "--dry-run", "data.path=photos")
    assert done.returncode == 0 and "photos: 4 classes" in done.stderr, done.stderr
    assert all(
        line.startswith(("photos: ", "model.classes: ", "warning: photos: ")) for line in done.stderr.splitlines()
    )
    assert ("photos: ' a' and 'A' are two classes" in done.stderr) == (names[0] == "a")


def whole(path: Path) -> bytes:
    return b"".join(tokens.blocks(Text(name="text", path=str(path))))


def test_texts_are_joined_line_by_line_without_marks(tmp_path: Path) -> None:
    for name, content in (
        ("a.txt", b"first file without a line end END"),
        ("b.txt", b"\xef\xbb\xbfSTART of the second\r\nand \xef\xbb\xbf no more"),
        ("c/only-a-mark.txt", b"\xef\xbb\xbf"),
        ("c/d.txt", "ends in ä".encode()),
        ("e.txt", b"old\rMac\r"),
        ("f.txt", b"\nlast"),
        (".git/config", b"no"),
        ("c/.ipynb_checkpoints/d.txt", b"no"),
        ("__MACOSX/a.txt", b"no"),
        ("c/._d.txt", b"\0\0no"),
    ):
        (tmp_path / "two" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "two" / name).write_bytes(content)
    (tmp_path / "two" / "c" / "linked").symlink_to("..")
    (tmp_path / "two" / "gone.txt").symlink_to("nowhere")
    (tmp_path / "two" / "empty.txt").touch()
    with socket.socket(socket.AF_UNIX) as ear:
        ear.bind(str(tmp_path / "two" / "socket"))
    expected = (
        "first file without a line end END\nSTART of the second\r\nand \ufeff no more\nends in ä\nold\rMac\r\nlast"
    )
    assert whole(tmp_path / "two").decode() == expected
    data = Text(name="text", path=str(tmp_path / "two"))
    (line,) = tokens.open_tokens(data).left_out
    assert line == (
        f"{tmp_path / 'two'}: 4 files left out: 1 FIFO, socket or device, 1 dangling link, 1 empty file, "
        "1 link to a folder"
    )


def test_long_lines_at_the_end_of_a_file_are_closed(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("next")
    for length in (2**16 - 1, 2**16, 2**16 + 1, 2**16 + 2, 2**16 + 3):
        (tmp_path / "a.txt").write_bytes(b"x" * (length - 4) + "😀".encode())
        assert whole(tmp_path) == (tmp_path / "a.txt").read_bytes() + b"\nnext", length


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("words\n".encode("utf-16"), r"got the byte 0xff at offset 0, in .*iconv -f UTF-16 -t UTF-8"),
        ("words\n".encode("utf-16-le"), r"got 6 NUL bytes among the first 12: it is UTF-16"),
        ("words\n".encode("utf-32"), r"iconv -f UTF-32 -t UTF-8"),
        (b"\xef\xbb\xbfgood\nb\xe4d\n", r"got the byte 0xe4 at offset 9, in"),
        (gzip.compress(b"words\n", mtime=0), r"it is compressed: unpack it"),
        (b"%PDF-1.7\n%\xe2\xe3", r"take its text out"),
    ],
)
def test_other_encodings_are_refused_by_name(content: bytes, told: str, tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "a.txt").write_text("fine\n")
    (tmp_path / "t" / "b.txt").write_bytes(content)
    with pytest.raises(RequestError, match=rf"t/b\.txt: expected UTF-8, {told if told[0] == 'g' else f'.*{told}'}"):
        whole(tmp_path / "t")


def test_a_text_that_changes_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("one\n" * 100)
    read = tokens.blocks

    def changing(data: Text, cut: int = 0) -> Iterator[bytes]:
        yield from read(data, cut)
        (tmp_path / "a.txt").write_text("two\n" * 100)

    monkeypatch.setattr(tokens, "blocks", changing)
    with pytest.raises(RequestError, match="the text has changed while it was read"):
        tokens.open_tokens(Text(name="text", path=str(tmp_path / "a.txt")))
    assert not list((tmp_path / "cache").rglob("*.bin"))


def test_folders_that_cannot_be_read_are_lines(tmp_path: Path) -> None:
    for name, told in (("round", "cannot be read \\(Too many levels of symbolic links\\)"), ("nowhere", "no such f")):
        if name == "round":
            (tmp_path / name).symlink_to(name)
        with pytest.raises(RequestError, match=f"{name}: {told}"):
            imagefolder.look(wanted(tmp_path / name), 1)
        with pytest.raises(RequestError, match=f"{name}: {told}"):
            whole(tmp_path / name)
    draw(tmp_path / "photos" / "a", "1.png")
    (tmp_path / "photos" / "train").symlink_to("train")
    assert imagefolder.look(wanted(tmp_path / "photos"), 1).left_out == {"loop of links": 1}


def test_two_names_of_one_folder_are_no_silent_classes(tmp_path: Path, inside: Hvdkit) -> None:
    for name in ("a", "b"):
        draw(tmp_path / "vehicles" / "train" / name, *(f"{number}.png" for number in range(24)))
    draw(tmp_path / "vehicles" / "test", "1.png")
    (tmp_path / "vehicles" / "train" / "latest").symlink_to("b")
    done = inside("train", "resnet20-folder", "--framework", "pytorch", "--dry-run", "data.path=vehicles")
    assert done.returncode == 0, done.stderr
    assert (
        "warning: vehicles/train: 'b' and 'latest' are two classes and the same folder; remove the link" in done.stderr
    )
    assert "vehicles: 1 file left out: 1 beside train and val" in done.stdout
