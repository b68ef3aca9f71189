"""Folders of one's own images: what they decide, how they are divided, and how other pictures are prepared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hvdkit.checkpoint import snapshots
from hvdkit.checkpoint.resume import check_classes
from hvdkit.checkpoint.writing import Checkpoints
from hvdkit.core.step_plan import Progress
from hvdkit.data import imagefolder, pictures, pixels
from hvdkit.data.batches import open_dataset
from hvdkit.errors import RequestError
from hvdkit.recipe import schema
from hvdkit.recipe.schema import ImageFolder, Recipe
from hvdkit.tasks import folder, resnet
from tests.conftest import ROOT, Hvdkit
from tests.data.pictures import draw_folder
from tests.test_checkpoint import whole

pytestmark = pytest.mark.check

RECIPE = ROOT / "recipes" / "resnet20-folder.yaml"


def flat_folder(root: Path, counts: dict[str, int], size: tuple[int, int] = (40, 30)) -> Path:
    """Class folders directly below the root, with random images of this width and height."""
    random = np.random.default_rng(0)
    for name, count in counts.items():
        (root / name).mkdir(parents=True)
        for number in range(count):
            coarse = random.integers(0, 256, (4, 4, 3), dtype=np.uint8)
            Image.fromarray(coarse).resize(size).save(root / name / f"{number:03}.png")
    return root


def wanted(path: Path, **settings: object) -> ImageFolder:
    return ImageFolder.model_validate({"name": "imagefolder", "path": str(path), "size": 16} | settings)


def names(listing: imagefolder.Listing) -> list[str]:
    return [str(Path(listing.path(index)).relative_to(listing.folder)) for index in range(len(listing))]


def decided(path: Path, *overrides: str, earlier: Recipe | None = None) -> folder.Decision:
    recipe = schema.load(RECIPE, [f"data.path={path}", *overrides])
    return folder.decide(recipe, earlier)


# The split


def test_a_part_of_each_class_is_held_out_and_no_image_is_in_both(tmp_path: Path) -> None:
    root = flat_folder(tmp_path, {"a": 20, "b": 10, "c": 2, "d": 1})
    found = imagefolder.look(wanted(root), 1)
    train, val = names(found.train), names(found.val)
    assert found.held_out and not set(train) & set(val) and len(train) + len(val) == 33
    assert np.bincount(found.val.labels, minlength=4).tolist() == [4, 2, 1, 0]  # one image alone is trained on
    assert np.bincount(found.train.labels, minlength=4).tolist() == [16, 8, 1, 1]
    for share, count in ((0, 0), (0.5, 16), (0.99, 29)):
        assert len(open_dataset(wanted(root, validation=share), 4, 1).val) == count


def test_the_split_depends_on_the_seed_and_the_names_alone(tmp_path: Path) -> None:
    roots = [flat_folder(tmp_path / name, {"a": 40, "b": 40}) for name in ("here", "elsewhere")]
    (roots[1] / "a" / "notes.txt").touch()
    first, moved = (imagefolder.look(wanted(root), 1) for root in roots)
    reseeded = imagefolder.look(wanted(roots[0]), 2)
    assert names(first.val) == names(moved.val) and names(first.val) != names(reseeded.val)
    assert moved.left_out == {".txt": 1}
    note = open_dataset(wanted(roots[0]), 2, 1).note
    assert note and note.startswith("64 images for training, 16 for validation")
    # an image that comes later moves few of the others: none but what the share asks for
    Image.new("RGB", (9, 9)).save(roots[1] / "a" / "new.png")
    later = set(names(imagefolder.look(wanted(roots[1]), 1).val)) - {"a/new.png"}
    assert len(later - set(names(first.val))) <= 1 and len(set(names(first.val)) - later) <= 1


def test_a_folder_train_without_val_is_split_and_a_class_may_be_called_train(tmp_path: Path) -> None:
    flat_folder(tmp_path / "photos" / "train", {"a": 5, "b": 5})
    assert names(imagefolder.look(wanted(tmp_path / "photos"), 1).val)[0].startswith("a/")
    vehicles = flat_folder(tmp_path / "vehicles", {"bus": 5, "train": 5})
    assert imagefolder.look(wanted(vehicles), 1).classes == ["bus", "train"]
    assert not imagefolder.look(wanted(draw_folder(tmp_path / "both")), 1).held_out


# What the folder decides


@pytest.mark.parametrize(
    ("model", "shape", "size"),
    [
        ("resnet20", (20, 16), 32),
        ("resnet18", (640, 480), 224),
        ("resnet18", (150, 100), 96),
        ("resnet50", (28, 28), 32),
    ],
)
def test_size_and_classes_come_from_the_folder(model: str, shape: tuple[int, int], size: int, tmp_path: Path) -> None:
    found = decided(flat_folder(tmp_path, {"a": 3, "b": 3, "c": 3}, shape), f"model.name={model}")
    data = found.recipe.data
    assert isinstance(data, ImageFolder) and not found.recipe.undecided
    assert (found.recipe.model.classes, data.size, data.resize) == (3, size, round(size * 8 / 7))
    assert schema.revise(found.recipe.model_dump(), "resolved") == found.recipe
    said = decided(tmp_path, "model.classes=5", "data.size=48", "data.resize=50").recipe
    assert (said.model.classes, said.data.size, said.data.resize) == (5, 48, 50)  # type: ignore[union-attr]
    assert "3 classes (a, b, c)" in found.lines[0] and f"data.size: {size}" in found.lines[1]


def test_a_resumed_run_keeps_what_was_decided(tmp_path: Path) -> None:
    root = flat_folder(tmp_path / "photos", {"a": 3, "b": 3}, (100, 100))
    before = decided(root, "model.name=resnet18").recipe
    for path in root.rglob("*.png"):
        Image.new("RGB", (300, 300)).save(path)
    assert decided(root, "model.name=resnet18").recipe != before
    assert decided(root, "model.name=resnet18", earlier=before).recipe == before
    flat_folder(root, {"c": 3})
    with pytest.raises(RequestError, match="has 3 class folders"):
        decided(root, "model.name=resnet18", earlier=before)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["model.classes=10"], ["model.classes: the model has 10 classes, the folder 2; set model.classes=2"]),
        (["data.size=224"], ["data.size: resnet20 is made for 32 pixels", "data.size=32"]),
        (["data.size=32", "data.resize=256"], ["data.resize: ", "the 32 × 32 in the centre"]),
        (["model.name=resnet50", "data.size=32"], ["data.size: resnet50 is made for 224", "1 × 1", "resnet20"]),
        ([], []),
    ],
)
def test_mismatches_are_said_before_training(words: list[str], parts: list[str], tmp_path: Path) -> None:
    root = flat_folder(tmp_path, {"a": 3, "b": 3}, (100, 100))
    lines = decided(root, *words).warnings
    assert len(lines) == bool(parts)
    assert all(part in lines[0] for part in parts)


def test_a_networks_arithmetic_is_that_of_its_paper() -> None:
    # He et al. 2016: ResNet-20 has 41 million multiply-adds, and torchvision's ResNet-50 4.1 billion
    assert resnet.architecture("resnet20", 10).multiply_adds(32) == pytest.approx(41e6, rel=0.02)
    assert resnet.architecture("resnet50", 1000).multiply_adds(224) == pytest.approx(4.1e9, rel=0.02)
    assert resnet.architecture("resnet18", 1000).multiply_adds(224) == pytest.approx(1.8e9, rel=0.02)


def test_contradictions_are_refused_before_anything_is_written(inside: Hvdkit, tmp_path: Path) -> None:
    root = flat_folder(tmp_path / "photos", {"a": 3, "b": 3, "c": 3})
    flat_folder(tmp_path / "one", {"a": 3})
    for words, part in (
        ([f"data.path={root}", "model.classes=2"], "photos has 3 class folders (a, b, c), the model 2 classes; set"),
        ([f"data.path={tmp_path / 'one'}"], "expected two class folders or more, found only 'a'"),
        ([f"data.path={tmp_path / 'none'}"], "none: no such folder; expected one with a folder of images for each"),
        ([f"data.path={root}", "data.validation=1"], "data.validation: "),
        ([f"data.path={root}", "data.size=7"], "data.size: expected 'auto' or a whole number from 8 to 4096, got 7"),
        ([f"data.path={root}", "data.resize=40"], "expected a size beside resize"),
    ):
        done = inside("train", "resnet20-folder", *words, "--out", "run")
        assert done.returncode == 2 and part in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
    assert not (tmp_path / "run").exists()


def test_every_class_name_can_be_written(tmp_path: Path) -> None:
    root = flat_folder(tmp_path, {"Übel": 2, "b": 2})
    (root / "b").rename(Path(str(root) + "/b\udcff"))
    dataset = open_dataset(wanted(root), 2, 1)
    assert dataset.preprocessing and list(dataset.preprocessing.class_names) == ["b\ufffd", "Übel"]


def test_a_checkpoint_of_other_classes_is_refused(tmp_path: Path) -> None:
    data = [open_dataset(wanted(flat_folder(tmp_path / n, {n: 2, "z": 2})), 2, 1) for n in ("cat", "dog")]
    record = snapshots.CheckpointRecord(
        progress=Progress(), np=1, framework="", framework_version="", hvdkit_version="", recipe={},
        preprocessing=data[0].preprocessing,
    )  # fmt: skip
    check_classes(record, data[0])
    with pytest.raises(RequestError, match=r"expected the checkpoint's classes \(cat, z\), got dog, z"):
        check_classes(record, data[1])


# Other pictures


def prepared(path: Path, data: Any) -> np.ndarray:
    how = pictures.preprocessing(data, 2, None)
    return np.asarray(pictures.open_pictures([str(path)], data, how).val.batch(np.array([0])).inputs[0])


def test_a_photo_is_turned_where_the_recipe_says_so(tmp_path: Path) -> None:
    upright = Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 30, 3), dtype=np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6  # stored lying: to be turned by 90° clockwise
    upright.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "lying.png", exif=exif)
    upright.save(tmp_path / "upright.png")
    for turn in (True, False):
        found = prepared(tmp_path / "lying.png", wanted(tmp_path, exif_orientation=turn))
        assert np.array_equal(found, prepared(tmp_path / "upright.png", wanted(tmp_path))) == turn


def test_a_large_jpeg_is_decoded_in_part_where_the_recipe_says_so(tmp_path: Path) -> None:
    smooth = np.random.default_rng(0).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    Image.fromarray(smooth).resize((1600, 1200), Image.Resampling.BICUBIC).save(tmp_path / "large.jpg", quality=95)
    whole, reduced = (wanted(tmp_path, reduced_jpeg=each) for each in (False, True))
    sizes = [imagefolder.read(data, str(tmp_path / "large.jpg")).size for data in (whole, reduced)]
    assert sizes == [(1600, 1200), (200, 150)], "an eighth has still four times 18 pixels"
    found = [prepared(tmp_path / "large.jpg", data) for data in (whole, reduced)]
    assert 0 < np.abs(found[0] - found[1]).max() < 0.1
    Image.open(tmp_path / "large.jpg").resize((140, 100)).save(tmp_path / "small.jpg")
    assert imagefolder.read(reduced, str(tmp_path / "small.jpg")).size == (140, 100)


def test_a_picture_of_a_digit_is_what_the_model_was_trained_on(tmp_path: Path) -> None:
    square = np.zeros((28, 28), np.uint8)
    square[4:24, 10:18] = 200
    Image.fromarray(square).save(tmp_path / "digit.png")
    expected = pixels.normalised(np.repeat(np.pad(square, 2)[..., None], 3, axis=-1), (0.1005,) * 3, (0.2757,) * 3)
    assert np.array_equal(prepared(tmp_path / "digit.png", schema.Mnist5k(name="mnist5k")), expected)


def test_classes_without_a_name_have_their_number() -> None:
    data = ImageFolder(name="imagefolder", path="x", size=16)
    how = pictures.preprocessing(data, 3, None)  # a checkpoint of an earlier hvdkit
    assert how.class_names == ("0", "1", "2") and (how.size, how.resize, how.channels) == (16, 18, 3)
    named = pictures.preprocessing(data, 3, pictures.Preprocessing(("cat",), 16, pixels.MEAN, pixels.DEVIATION))
    assert named.class_names == ("cat", "1", "2")
    with pytest.raises(RequestError, match="trained on 'synthetic'"):
        pictures.preprocessing(schema.Synthetic(name="synthetic"), 3, None)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with a checkpoint that fits nothing, for requests that are refused."""
    run = tmp_path_factory.mktemp("run")
    recipe = schema.load(ROOT / "recipes" / "resnet20-digits.yaml")
    record = snapshots.CheckpointRecord(
        progress=Progress(step=3), np=1, framework="pytorch", framework_version="", hvdkit_version="",
        recipe=recipe.model_dump(mode="json"),
    )  # fmt: skip
    checkpoints = Checkpoints(run / "checkpoints", schema.Checkpointing(), "accuracy")
    checkpoints.write(*whole(record, {"fc.weight": np.zeros((2, 2), np.float32)}))
    checkpoints.wait()
    return run


def test_bad_pictures_are_lines_and_nothing_is_written(checkpoint: Path, inside: Hvdkit, tmp_path: Path) -> None:
    (tmp_path / "text.jpg").write_text("no picture")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "text.txt").touch()
    Image.new("RGB", (9, 9)).save(tmp_path / "good.png")
    Image.new("RGB", (9, 9)).save(tmp_path / "it.gif")
    done = inside("predict-images", checkpoint, "text.jpg", "missing.png", "good.png", "empty", "it.gif", "--out", "o")
    assert done.returncode == 2 and not (tmp_path / "o").exists()
    lines = done.stderr.splitlines()
    assert [line.split(": ")[0] for line in lines] == ["text.jpg", "missing.png", "empty", "it.gif"]
    assert "neither JPEG nor PNG, whatever its name says" in lines[0] and "No such file" in lines[1]
    assert "no images in it, but 1 .txt file; expected" in lines[2]
    assert "neither JPEG nor PNG but GIF: convert it to PNG" in lines[3]
    for kind in ("BMP", "TIFF", "WebP"):
        Image.new("RGB", (9, 9)).save(tmp_path / "it", format=kind)
        assert f"it: neither JPEG nor PNG but {kind}: convert" in inside("predict-images", checkpoint, "it").stderr
    for words, part in (
        ((tmp_path / "nowhere", "good.png"), "nowhere: no such folder"),
        ((checkpoint, "good.png", "--top", 0), "--top 0: expected at least 1"),
        ((checkpoint, "good.png", "--out", checkpoint, "--overwrite"), "--overwrite would remove"),
    ):
        done = inside("predict-images", *words)
        assert done.returncode == 2 and part in done.stderr, done.stderr


def test_the_first_framework_that_is_built_is_taken(
    checkpoint: Path, hollow_runtimes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hvdkit.commands import predict_images

    Image.new("RGB", (9, 9)).save(tmp_path / "good.png")
    plan, query = predict_images.checked(checkpoint, [tmp_path], None, 20)
    assert (plan.framework, query["top"], query["files"]) == ("pytorch", 10, [str(tmp_path / "good.png")])
    assert Path(query["checkpoint"]).name == "last" and plan.np == 1
    (tmp_path / "runtimes").mkdir()
    (tmp_path / "runtimes" / "mxnet").symlink_to(hollow_runtimes / "mxnet")
    monkeypatch.setenv("HVDKIT_RUNTIMES", str(tmp_path / "runtimes"))
    with pytest.raises(RequestError):  # its interpreter is another folder's
        predict_images.checked(checkpoint, [tmp_path / "good.png"], "pytorch", 3)
