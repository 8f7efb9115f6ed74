"""Layer 0. Files that hold CURVE keys; what somebody else may have touched is not believed.

The format is that of ZeroMQ certificates, which the tools and bindings of other languages read:
NAME.key has the public key and may be given away, NAME.key_secret has both and is its owner's.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import NamedTuple

import zmq

from gpuworker.errors import ConfigError

__all__ = [
    "PUBLIC_SUFFIX",
    "SECRET_SUFFIX",
    "KeyPair",
    "load_public_key",
    "load_public_keys",
    "load_secret_key",
    "write_key_pair",
]

PUBLIC_SUFFIX = ".key"
SECRET_SUFFIX = ".key_secret"
_MAX_FILE_BYTES = 4096
_NAME = re.compile(r"[0-9A-Za-z_][0-9A-Za-z_.-]{0,63}")
_LINE = re.compile(rb"""\s*(public|secret)-key\s*=\s*["']([!-~]{40})["']\s*""")
_PLAIN = re.compile(rb"\s*(#.*|metadata|curve)?\s*")
_PUBLIC_TEXT = """\
# A public key of CURVE, made by gpuworker keygen. It may be given away.
metadata
curve
    public-key = "{public}"
"""
_SECRET_TEXT = """\
# A secret key of CURVE, made by gpuworker keygen. Nobody but its owner may read it.
metadata
curve
    public-key = "{public}"
    secret-key = "{secret}"
"""


class KeyPair(NamedTuple):
    """Both keys as 40 characters of Z85; it prints the public one only."""

    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"KeyPair(public={self.public!r})"


def write_key_pair(directory: Path, name: str) -> tuple[Path, Path]:
    """Write NAME.key and NAME.key_secret, and return their paths.

    The secret file has mode 600 from its first moment. Raises ConfigError when this libzmq has
    no CURVE, when a file of that name exists and when nothing can be written; nothing of the
    pair is left then.
    """
    if not zmq.has("curve"):
        raise ConfigError("this build of libzmq has no CURVE; install pyzmq from its wheels")
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} cannot be the name of a key; up to 64 letters, digits, and _ . - can, "
            "with a letter, digit or _ first"
        )
    keys = {
        kind: key.decode()
        for kind, key in zip(("public", "secret"), zmq.curve_keypair(), strict=True)
    }
    public_path = directory / f"{name}{PUBLIC_SUFFIX}"
    secret_path = directory / f"{name}{SECRET_SUFFIX}"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make {directory}: {error.strerror}") from error
    _write_new(secret_path, _SECRET_TEXT.format_map(keys), 0o600)
    try:
        _write_new(public_path, _PUBLIC_TEXT.format_map(keys), 0o644)
    except BaseException:
        secret_path.unlink()
        raise
    return public_path, secret_path


def load_secret_key(path: Path) -> KeyPair:
    """Read a pair from a secret file.

    Raises ConfigError unless it is a plain file of this user that nobody else may read, and
    holds a pair.
    """
    data, status = _read(path, os.O_NOFOLLOW)
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid != os.geteuid():
        raise ConfigError(
            f"the secret key {path} belongs to user {status.st_uid}, and this is user "
            f"{os.geteuid()}; use a key of your own"
        )
    if mode & 0o077:
        raise ConfigError(
            f"the secret key {path} has mode {mode:03o}, so others may read it: chmod 600 it, "
            "and make a new one if somebody could have"
        )
    keys = _keys_of(path, data)
    if "secret" not in keys:
        raise ConfigError(f"{path} holds no secret key; a {SECRET_SUFFIX} file does")
    if zmq.curve_public(keys["secret"]) != keys["public"]:
        raise ConfigError(f"the two keys in {path} are no pair; gpuworker keygen makes one")
    return KeyPair(keys["public"], keys["secret"])


def load_public_key(path: Path) -> bytes:
    """Read a public key, 40 characters of Z85.

    Raises ConfigError for a file that holds none or a secret one, and for one that others may
    write, because they could put a key of theirs into it.
    """
    data, status = _read(path, 0)
    _check_writers(path, status)
    keys = _keys_of(path, data)
    if "secret" in keys:
        raise ConfigError(
            f"{path} holds a secret key, which nobody but its owner should have; give the "
            f"{PUBLIC_SUFFIX} file beside it"
        )
    return keys["public"]


def load_public_keys(path: Path) -> frozenset[bytes]:
    """Read one public key file, or those of a directory; raises ConfigError when there is none."""
    if not path.is_dir():
        return frozenset({load_public_key(path)})
    _check_writers(path, path.stat())
    keys = frozenset(map(load_public_key, sorted(path.glob(f"*{PUBLIC_SUFFIX}"))))
    if not keys:
        raise ConfigError(
            f"{path} holds no {PUBLIC_SUFFIX} file, so nobody could connect; put those of the "
            "clients there"
        )
    return keys


def _read(path: Path, flags: int) -> tuple[bytes, os.stat_result]:
    """Return what is in a plain file, and what the system says of that very file."""
    try:
        # Not to wait for the other end of a pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)
    except OSError as error:
        hint = "; a link may not stand for it" if flags and path.is_symlink() else ""
        raise ConfigError(f"cannot read the key {path}: {error.strerror}{hint}") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{path} is not a file; a key is in one")
        return os.read(descriptor, _MAX_FILE_BYTES + 1), status
    finally:
        os.close(descriptor)


def _check_writers(path: Path, status: os.stat_result) -> None:
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid not in (os.geteuid(), 0) or mode & 0o022:
        raise ConfigError(
            f"{path} has mode {mode:03o} and owner {status.st_uid}, so others may write it and "
            "choose whose key is believed: chmod go-w it, and let it be yours or root's"
        )


def _keys_of(path: Path, data: bytes) -> dict[str, bytes]:
    """Return the public key and, where there is one, the secret key of a file."""
    keys: dict[str, bytes] = {}
    for line in data.splitlines():
        if _PLAIN.fullmatch(line):
            continue
        found = _LINE.fullmatch(line)
        kind = found[1].decode() if found else ""
        if found is None or kind in keys or not _is_key(found[2]):
            keys.clear()
            break
        keys[kind] = found[2]
    if "public" not in keys or len(data) > _MAX_FILE_BYTES:
        raise ConfigError(
            f"{path} holds no key that can be read; gpuworker keygen writes such files"
        )
    return keys


def _is_key(key: bytes) -> bool:
    """Whether 40 characters are 32 bytes of Z85."""
    try:
        zmq.curve_public(key)
    except zmq.ZMQError:
        return False
    return True


def _write_new(path: Path, text: str, mode: int) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    except FileExistsError as error:
        raise ConfigError(
            f"{path} exists, and a key is not overwritten; choose another name"
        ) from error
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    try:
        with open(descriptor, "w", encoding="ascii") as file:
            file.write(text)
    except OSError as error:
        path.unlink()
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
