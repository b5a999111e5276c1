"""An artifact as a folder or as one zip: where its files come from, and the code that is loaded from it."""
import os
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
from infc.runtime import library
from infc.runtime.artifact import read, verify_files
from infc.runtime.errors import RuntimeFault
from infc.runtime.session import load


def pack(path: Path, target: Path, *, compress: bool = False) -> Path:
    kind = zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED
    with zipfile.ZipFile(target, "w", kind) as archive:
        for file in sorted(f for f in path.rglob("*") if f.is_file()):
            archive.write(file, file.relative_to(path))
    return target


def test_a_stored_zip_works_like_the_folder(fake):
    zipped = pack(fake.write(), fake.folder / "one.infc")
    with load(zipped) as model:
        assert model.generate([1, 2, 3], max_tokens=20, ignore_eos=True)[0].token_ids == fake.answer([1, 2, 3], 20)
    verify_files(zipped).close()


@pytest.mark.parametrize("packed", [False, True])
def test_the_code_that_runs_is_the_artifacts_own(fake, other, monkeypatch, packed):
    """Other code at the same path, each loaded as if for the first time; what was loaded before is still in the process."""
    before = os.listdir("/proc/self/fd")
    for one in (fake, other, other, fake, other):
        monkeypatch.setattr(library, "_LOADED", {})
        path = one.write(force=True)
        with load(pack(path, fake.folder / "one.zip") if packed else path) as model, model.sequence() as s:
            assert np.array_equal(model.step([s], [[1, 2, 3]]).logits[0], [one.logits([1, 2, 3])])
    assert os.listdir("/proc/self/fd") == before


def test_code_is_loaded_once(fake, other):
    zipped = pack(fake.write(), fake.folder / "one.zip")
    with load(zipped) as model, load(other.write("other.infc")) as different, load(fake.folder / "fake.infc") as again:
        answers = [m.generate([1, 2], max_tokens=4)[0].token_ids for m in (model, different, again)]
        assert answers == [f.answer([1, 2], 4) for f in (fake, other, fake)]
        here, elsewhere, too = (m.executor.library.symbol("k_hash") for m in (model, different, again))
        assert here == too != elsewhere


def test_code_in_a_file_changed_after_it_was_hashed_is_refused(fake, other):
    with read(fake.write()) as opened:
        (opened.path / opened.manifest.code).write_bytes(other.library)
        with pytest.raises(RuntimeFault, match=r"code/.* (was altered|has \d+ bytes)"): opened.code()


def test_a_bad_zip_is_refused(fake):
    path = fake.write()
    with pytest.raises(RuntimeFault, match="is compressed"):
        load(pack(path, fake.folder / "deflated.infc", compress=True))
    data = pack(path, fake.folder / "cut.infc").read_bytes()
    (fake.folder / "cut.infc").write_bytes(data[:len(data) // 2])
    with pytest.raises(RuntimeFault, match="neither a folder nor a whole zip"):
        load(fake.folder / "cut.infc")
    flipped = bytearray(data)
    flipped[data.index(b"infc.write.default")] ^= 1
    (fake.folder / "flip.infc").write_bytes(flipped)
    with pytest.raises(RuntimeFault, match=r"was altered"), load(fake.folder / "flip.infc") as model:
        model.generate([1, 2, 3], max_tokens=2)


def test_a_damaged_directory_of_a_zip_is_one_line(fake):
    """zipfile has an exception of its own for every field: of the version, a name, an offset, the directory's size."""
    data = pack(fake.write(), fake.folder / "whole.zip").read_bytes()
    entry, end = data.index(b"PK\x01\x02"), data.rindex(b"PK\x05\x06")
    zip64 = struct.pack("<4sQHHLLQQQQ4sLQL", b"PK\6\6", 44, 45, 45, 0, 0, 9, 9, 2**64 - 1, 2**64 - 1, b"PK\6\7", 0, end, 1)
    for at, new in (
        (entry + 6, b"\x6a\0"), (entry + 46, b"\xff"), (entry + 28, b"\0\0"), (entry + 42, b"\xff\xff\xff\x7f"),
        (end + 12, b"\xff\xff\xff\x7f"), (end + 16, b"\xff\xff\xff\x7f"), (end, zip64 + data[end:]),
    ):
        spoiled = bytearray(data)
        spoiled[entry + 9] |= 8                                     # names are UTF-8
        spoiled[at:at + len(new)] = new
        (fake.folder / "bad.infc").write_bytes(spoiled)
        before = os.listdir("/proc/self/fd")
        with pytest.raises(RuntimeFault) as caught: read(fake.folder / "bad.infc")
        assert "\n" not in str(caught.value) and str(caught.value).startswith(f"{fake.folder}/bad.infc: ")
        assert os.listdir("/proc/self/fd") == before


def test_an_encrypted_zip_is_refused(fake):
    data = bytearray(pack(fake.write(), fake.folder / "locked.infc").read_bytes())
    data[data.index(b"PK\x01\x02") + 8] |= 1
    (fake.folder / "locked.infc").write_bytes(data)
    with pytest.raises(RuntimeFault, match=r"code/.* is encrypted; pack with `zip -0 -r`"): read(fake.folder / "locked.infc")


def test_what_is_neither_a_folder_nor_a_file_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")                                    # whose reader would wait for a writer
    for path in (tmp_path / "pipe", Path("/dev/null")):
        with pytest.raises(RuntimeFault, match="not an infc artifact: neither a folder nor a file"): read(path)


@pytest.mark.parametrize("path", ["a\0b", "a\ud800"])
def test_a_path_that_no_file_can_have(path):
    with pytest.raises(RuntimeFault, match=r"^the artifact's path is 'a.*', which no file can have; give another$"): load(path)
