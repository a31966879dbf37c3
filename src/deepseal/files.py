"""Files: where data sets lie, and writing so that a failure leaves nothing half done and nothing is lost."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from deepseal.errors import InputError

_REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file would be larger than allowed here",
    errno.EACCES: "no permission to write there",
    errno.EPERM: "no permission to write there",
    errno.EROFS: "the file system is read-only",
    errno.ENOENT: "the folder does not exist",
    errno.ENOTDIR: "a part of the path is not a folder",
    errno.EISDIR: "a folder",
    errno.ENAMETOOLONG: "the name is too long",
}


def data_folders() -> list[Path]:
    """Where data sets are looked for: ``DEEPSEAL_DATA``, then the usual places."""
    stated = os.environ.get("DEEPSEAL_DATA")
    usual = [Path.home() / ".cache" / "deepseal", Path("/usr/share/datasets")]
    return [Path(stated), *usual] if stated else usual


def check_writable(path: Path, *, force: bool = False) -> None:
    """Find out before the work starts whether ``path`` can be written after it.

    Raises:
        InputError: the file exists (without ``force``), or its folder is missing or not writable.
    """
    try:
        if path.is_dir():
            raise InputError("a file name to write to", found=f"the folder {path}", do="add a file name")
        if path.exists() and not path.is_file():
            raise InputError(
                "a regular file to write to", found=f"{path}, a device or a pipe", do="choose another name"
            )
        if path.exists() and not force:
            raise InputError(f"no file at {path}", found="one that exists", do="choose another name or add --force")
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:40]}.")
        os.close(descriptor)
        Path(name).unlink()
    except OSError as error:
        raise _unwritable(path, error) from error


def write_atomically(path: Path, data: bytes, *, force: bool = False, mode: int | None = None) -> None:
    """Write all of ``data`` or nothing (see ``pending``)."""
    with pending(path, force=force, mode=mode) as temporary, temporary.open("wb") as stream:
        stream.write(data)


@contextlib.contextmanager
def pending(path: Path, *, force: bool = False, mode: int | None = None) -> Iterator[Path]:
    """A temporary file beside ``path`` that becomes ``path`` when the block ends well, and is removed when not.

    Args:
        path: the file to be.
        force: replace a file that exists.
        mode: permission bits; None gives what the process's umask allows.

    Raises:
        InputError: the file exists (without ``force``) or cannot be written; nothing is left behind.
    """
    check_writable(path, force=force)
    temporary: Path | None = None
    try:
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:40]}.", suffix=path.suffix)
        os.close(descriptor)
        temporary = Path(name)
        yield temporary
        with temporary.open("rb") as stream:
            os.fsync(stream.fileno())
        temporary.chmod(mode if mode is not None else 0o666 & ~umask())
        if force:
            temporary.replace(path)
        else:
            _publish(temporary, path)
    except FileExistsError as error:
        raise InputError(
            f"no file at {path}", found="one that exists", do="choose another name or add --force"
        ) from error
    except OSError as error:
        raise _unwritable(path, error) from error
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


def read_bytes(path: Path, what: str, *, limit: int | None = None, pipes: bool = False) -> bytes:
    """The content of a file that the user named.

    ``pipes`` allows one that another program writes to, such as ``<(command)`` of a shell: it is waited for.

    Raises:
        InputError: no such file, no permission, a folder, a device (which may never end), or larger than ``limit``
            bytes.
    """
    try:
        about = path.stat()
        if not (stat.S_ISREG(about.st_mode) or stat.S_ISDIR(about.st_mode) or (pipes and stat.S_ISFIFO(about.st_mode))):
            raise InputError(f"{what} in a regular file", found=f"{path}, a device or a pipe", do="name a file")
        with path.open("rb") as stream:
            data = stream.read() if limit is None else stream.read(limit + 1)
        if limit is not None and len(data) > limit:
            size = max(about.st_size, len(data))
            raise InputError(f"{what} of at most {limit} bytes", found=f"{size} bytes", do="check the file")
        return data
    except OSError as error:
        raise InputError(f"{what} at {path}", found=_reason(error), do="check the name and its permissions") from error


def _publish(temporary: Path, path: Path) -> None:
    """Give the temporary file its name unless somebody else has taken it meanwhile."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links: reserve the name, then replace what reserves it
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        temporary.replace(path)


def umask() -> int:
    """The permission bits that this process takes from new files."""
    current = os.umask(0)
    os.umask(current)
    return current


def _reason(error: OSError) -> str:
    if error.errno == errno.ENOENT:
        return "no such file"
    return _REASONS.get(error.errno or 0, error.strerror or str(error))


def _unwritable(path: Path, error: OSError) -> InputError:
    reason = _REASONS.get(error.errno or 0, error.strerror or str(error))
    return InputError(f"{path} to be writable", found=reason, do="choose another place or make room")
