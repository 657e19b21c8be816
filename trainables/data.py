"""Training tokens: read from disk without loading them, and prepared from text files.

A source is one of

- `synthetic`: pseudo-random tokens, for throughput work;
- `corpus`, `corpus.bin` or `corpus.idx`: a Megatron-LM indexed dataset, the pair `corpus.bin` and `corpus.idx`;
- `tokens.npy`: one numpy array of integers, one dimension (`numpy.save`);
- `tokens.bin` with no `tokens.idx` beside it: raw little-endian uint16 tokens (`ndarray.tofile`);
- the URI of any of these on an object store, `s3://bucket/corpus`: see `trainables.objects`.

Tokens are packed: samples are cut from the stream one after the other, and document boundaries are ignored.

To train on data tokenised for Megatron-LM, name what its `tools/preprocess_data.py` wrote. From JSON lines with a
`text` field,

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix corpus --workers 16 --append-eod \\
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model meta-llama/Meta-Llama-3-8B

writes `corpus_text_document.bin` and `corpus_text_document.idx`; the source is then `corpus_text_document`, and the
model's vocabulary must be at least the tokenizer's. Nothing is converted, and reading needs nothing of Megatron-LM.

Layout of `.idx`, all little-endian (Megatron-LM, `megatron/core/datasets/indexed_dataset.py`): the nine bytes
`MMIDIDX\\0\\0`; version 1 (uint64); dtype code of the tokens (uint8); number of sequences S and of document indices D
(uint64 each); S sequence lengths in tokens (int32); S byte offsets into `.bin` (int64); D indices (int64) of the
sequences at which documents begin, the last of them being S. `.bin` holds the tokens alone.
"""

from __future__ import annotations

import codecs
import hashlib
import os
import struct
import tempfile
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

from trainables.objects import fetch, is_uri, pair

SYNTHETIC = "synthetic"
END_OF_DOCUMENT = 256
BYTE_VOCAB_SIZE = 257
TEXT_SUFFIXES = (".txt", ".md", ".rst", ".tex", ".html", ".py", ".c", ".h", ".cpp", ".java", ".js", ".rs", ".json")

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_VERSION = 1
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
_UINT16_CODE = 8
_INT32_MAX = 2**31 - 1
_CHECKED_TOKENS = 1_000_000
_DIGESTED, _DIGESTED_TOKENS = 64, 4096
_CHUNK_BYTES = 1 << 20


class DataError(ValueError):
    """The tokens cannot be used; its text is one line that says which file and why."""


class MissingDataError(DataError):
    """There is nothing at the place that was named."""


def located(source: str, folder: str | Path = ".") -> str:
    """`source` as a process with another working directory has to name it: a path, relative to `folder`, is made
    absolute."""
    return source if source == SYNTHETIC or is_uri(source) else os.path.abspath(Path(folder, Path(source).expanduser()))


class _Tokens(Protocol):
    """What a stream reads from: tokens by position."""

    def __len__(self) -> int: ...

    def __getitem__(self, span: slice, /) -> NDArray[np.integer]: ...


class TokenStream:
    """The packed tokens of one source, read by sample. Made by `open_tokens`.

    Open it in the process that reads it: a memory map does not travel between processes.
    """

    def __init__(self, tokens: _Tokens, vocab_size: int, source: str) -> None:
        self._tokens = tokens
        self.vocab_size = vocab_size
        self.source = source

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self._tokens)

    def num_samples(self, sequence_length: int) -> int:
        """Number of distinct samples; DataError if the stream is too short for one."""
        samples = (len(self) - 1) // sequence_length
        if samples < 1:
            raise DataError(
                f"{self.source} holds {len(self)} tokens; one sample of sequence length {sequence_length} "
                f"takes {sequence_length + 1}"
            )
        return samples

    def sequence(self, i: int, sequence_length: int) -> NDArray[np.int64]:
        """Sample `i`, int64 of length `sequence_length + 1`: inputs are `[:-1]`, labels `[1:]`.

        Sample `i` begins at token `i * sequence_length`; past the last full sample the stream begins again.
        Raises DataError if the stream is too short for one sample, or if a token is outside the vocabulary.
        """
        start = i % self.num_samples(sequence_length) * sequence_length
        return self._read(start, start + sequence_length + 1)

    def digest(self) -> str:
        """Eight hexadecimal digits of the SHA-256 of how many tokens there are and of `_DIGESTED` parts of them, evenly
        spread: the same for the same tokens, in whatever file and place they are."""
        hashed = hashlib.sha256(str(len(self)).encode())
        for part in range(_DIGESTED):
            start = len(self) * part // _DIGESTED
            tokens = np.array(self._tokens[start : min(len(self), start + _DIGESTED_TOKENS)], dtype="<i8")
            hashed.update(tokens.tobytes())
        return hashed.hexdigest()[:8]

    def check_sample(self) -> None:
        """DataError unless the first, middle and last million tokens are inside the vocabulary."""
        for start in {0, max(0, (len(self) - _CHECKED_TOKENS) // 2), max(0, len(self) - _CHECKED_TOKENS)}:
            self._read(start, min(len(self), start + _CHECKED_TOKENS))

    def _read(self, start: int, stop: int) -> NDArray[np.int64]:
        tokens = np.array(self._tokens[start:stop], dtype=np.int64)
        outside = (tokens < 0) | (tokens >= self.vocab_size)
        if outside.any():
            first = int(outside.argmax())
            raise DataError(
                f"{self.source}: token {tokens[first]} at position {start + first} is outside the model's "
                f"vocabulary of {self.vocab_size}"
            )
        return tokens


def open_tokens(source: str | Path, vocab_size: int) -> TokenStream:
    """The stream of tokens that `source` names (see the module's text), for a model with `vocab_size` token ids.

    Files are memory-mapped and checked cheaply: the headers, the sizes, and up to three million tokens. What is on an
    object store is copied first, unless this machine has it.
    Raises DataError with one line if the source is missing, damaged, not tokens, or outside the vocabulary.
    """
    if str(source) == SYNTHETIC:
        return TokenStream(_SyntheticTokens(vocab_size), vocab_size, SYNTHETIC)
    path = _copied(source) if isinstance(source, str) and is_uri(source) else Path(source).expanduser()
    try:
        tokens = _open_file(path)
    except OSError as error:
        raise DataError(f"cannot read {source}: {error.strerror}") from None
    stream = TokenStream(tokens, vocab_size, str(source))
    stream.check_sample()
    return stream


def _copied(source: str) -> Path:
    """This machine's copy of what is on an object store."""
    try:
        return fetch(source)
    except FileNotFoundError as error:
        raise MissingDataError(str(error)) from None
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {source}: {str(error).splitlines()[0]}") from None


@dataclass(frozen=True)
class _SyntheticTokens:
    """Endless pseudo-random tokens, a function of their position alone.

    Low ids are the more frequent ones, as in text: token = vocab_size * u^3 with u uniform on [0, 1). So a model that
    trains brings the loss down, from ln(vocab_size) towards an entropy 0.75 to 0.9 nats below.
    """

    vocab_size: int

    def __len__(self) -> int:
        return 1 << 62

    def __getitem__(self, span: slice, /) -> NDArray[np.integer]:
        # SplitMix64 of the position: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014.
        bits = np.arange(span.start + 1, span.stop + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        bits ^= bits >> np.uint64(31)
        uniform = (bits >> np.uint64(11)) * 2.0**-53
        return (self.vocab_size * uniform**3).astype(np.int64)


def _open_file(path: Path) -> NDArray[np.integer]:
    if path.suffix == ".npy":
        return _open_npy(path)
    data, index = map(Path, pair(str(path)))
    if index.exists() or path == index:
        return _open_indexed(data, index)
    if path == data:
        return _open_raw(data)
    if path.exists():
        raise DataError(
            f"{path} is not tokens: name a .bin/.idx pair, a .npy array or a raw .bin, or run `wattune data`"
        )
    if data.exists():
        raise DataError(f"{index} is missing beside {data}")
    raise MissingDataError(f"no tokens at {path}: there is neither {data} with {index} nor such a file")


def _open_npy(path: Path) -> NDArray[np.integer]:
    _require_file(path)
    try:
        tokens = np.lib.format.open_memmap(path, mode="r")
    except ValueError as error:
        raise DataError(f"{path} is not a whole numpy array: {error}") from None
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise DataError(
            f"{path} is not tokens: expected integers in one dimension, found {tokens.dtype} of shape {tokens.shape}"
        )
    if len(tokens) == 0:
        raise DataError(f"{path} holds no tokens")
    return tokens


def _open_raw(path: Path) -> NDArray[np.integer]:
    _require_file(path)
    tokens = _map_tokens(path, "<u2")
    if _is_text(path):
        raise DataError(f"{path} is not tokens: it holds text; tokenise it first, for example with `wattune data`")
    return tokens


def _open_indexed(data: Path, index: Path) -> NDArray[np.integer]:
    _require_file(index)
    _require_file(data)
    with index.open("rb") as stream:
        header = stream.read(_HEADER.size)
    if header[: len(_MAGIC)] != _MAGIC:
        raise DataError(f"{index} is not the index of an indexed dataset: it does not begin with MMIDIDX")
    if len(header) < _HEADER.size:
        raise DataError(f"{index} is truncated: {len(header)} bytes, its header alone takes {_HEADER.size}")
    _, version, code, sequences, documents = _HEADER.unpack(header)
    if version != _VERSION:
        raise DataError(f"{index} has index version {version}; only version {_VERSION} is known")
    if code not in _DTYPES:
        raise DataError(f"{index} has dtype code {code}; known codes are 1 to 8")
    dtype = np.dtype(_DTYPES[code])
    if dtype.kind == "f":
        raise DataError(f"{data} is not tokens: its index says {dtype.name}")
    expected = _HEADER.size + 12 * sequences + 8 * documents
    if index.stat().st_size < expected:
        raise DataError(f"{index} is truncated: {index.stat().st_size} bytes, its header promises {expected}")
    if sequences == 0:
        raise DataError(f"{index} describes no sequences")
    lengths = np.memmap(index, dtype="<i4", mode="r", offset=_HEADER.size, shape=(sequences,))
    described = int(lengths.sum(dtype=np.int64)) * dtype.itemsize
    if described != data.stat().st_size:
        raise DataError(f"{data} has {data.stat().st_size} bytes, but {index} describes {described}")
    return _map_tokens(data, dtype.str)


def _map_tokens(path: Path, dtype: str) -> NDArray[np.integer]:
    size, itemsize = path.stat().st_size, np.dtype(dtype).itemsize
    if size % itemsize:
        raise DataError(f"{path} is not tokens: its {size} bytes are not a multiple of {itemsize}")
    return np.memmap(path, dtype=dtype, mode="r")


def _require_file(path: Path) -> None:
    if not path.exists():
        raise MissingDataError(f"{path} does not exist")
    if not path.is_file():
        raise DataError(f"{path} is not a file")
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty")


def _is_text(path: Path) -> bool:
    """Whether the file begins as UTF-8 text does. uint16 tokens practically never do: ids below 256 alone hold NULs."""
    with path.open("rb") as stream:
        head = stream.read(4096)
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return b"\0" not in head


@dataclass(frozen=True)
class PreparedData:
    """What `prepare` wrote: `prefix` is the source to train on; `tokens` count the end-of-document marks."""

    prefix: Path
    documents: int
    tokens: int
    skipped_files: int


def prepare(
    files: Iterable[Path | str], out_prefix: Path | str, suffixes: Iterable[str] = TEXT_SUFFIXES
) -> PreparedData:
    """Writes the text of `files` as an indexed dataset, `out_prefix.bin` and `out_prefix.idx`.

    A token is a byte of UTF-8 (0 to 255), and END_OF_DOCUMENT follows each document: BYTE_VOCAB_SIZE ids, uint16.
    Each file is one document; a directory stands for the files under it whose suffix is in `suffixes`, in the order of
    their paths. Files that are empty, unreadable or not UTF-8 are skipped and counted. Texts are read in pieces, and
    the output appears whole or not at all. Raises DataError if a file is missing or too long, if no text is left, or if
    the output cannot be written.
    """
    prefix = str(out_prefix).removesuffix(".bin").removesuffix(".idx")
    data, index = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
    lengths, skipped = array("i"), 0
    try:
        data.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".prepare-", dir=data.parent) as scratch:
            new_data, new_index = Path(scratch, data.name), Path(scratch, index.name)
            with new_data.open("wb") as stream:
                for path in _text_files(files, tuple(s.lower() for s in suffixes)):
                    if length := _write_document(path, stream):
                        lengths.append(length)
                    else:
                        skipped += 1
            if not lengths:
                raise DataError(f"no text to tokenise: {skipped} files were empty, unreadable or not UTF-8")
            _write_index(new_index, lengths)
            # An old index must never stand beside the new tokens.
            index.unlink(missing_ok=True)
            os.replace(new_data, data)
            os.replace(new_index, index)
    except OSError as error:
        raise DataError(f"cannot prepare {data}: {error}") from None
    return PreparedData(Path(prefix), len(lengths), sum(lengths), skipped)


def _text_files(files: Iterable[Path | str], suffixes: tuple[str, ...]) -> Iterator[Path]:
    for path in map(Path, files):
        if path.is_dir():
            yield from (p for p in sorted(path.rglob("*")) if p.suffix.lower() in suffixes and p.is_file())
        elif path.is_file():
            yield path
        else:
            raise DataError(f"{path} does not exist")


def _write_document(path: Path, stream: BinaryIO) -> int:
    """Tokens appended to `stream`; 0, with `stream` as it was, if the file is empty, unreadable or not UTF-8."""
    if path.stat().st_size >= _INT32_MAX:
        raise DataError(f"{path} is too long for one document: split it into files below 2 GiB")
    start = stream.tell()
    try:
        length = sum(_write_tokens(chunk, stream) for chunk in _utf8_chunks(path))
    except (UnicodeDecodeError, PermissionError):
        stream.seek(start)
        stream.truncate()
        return 0
    if length == 0:
        return 0
    stream.write(END_OF_DOCUMENT.to_bytes(2, "little"))
    return length + 1


def _write_tokens(chunk: bytes, stream: BinaryIO) -> int:
    stream.write(np.frombuffer(chunk, dtype=np.uint8).astype("<u2").tobytes())
    return len(chunk)


def _utf8_chunks(path: Path) -> Iterator[bytes]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    with path.open("rb") as text:
        while chunk := text.read(_CHUNK_BYTES):
            decoder.decode(chunk)
            yield chunk
    decoder.decode(b"", final=True)


def _write_index(path: Path, lengths: array[int]) -> None:
    sizes = np.asarray(lengths, dtype="<i4")
    ends = np.cumsum(sizes, dtype="<i8") * 2
    offsets = np.concatenate([np.zeros(1, dtype="<i8"), ends[:-1]])
    with path.open("wb") as stream:
        stream.write(_HEADER.pack(_MAGIC, _VERSION, _UINT16_CODE, len(sizes), len(sizes) + 1))
        for column in (sizes, offsets, np.arange(len(sizes) + 1, dtype="<i8")):
            stream.write(column.tobytes())
