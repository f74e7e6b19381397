"""Taking known files out of a tar archive.

Only regular files that are asked for by name are taken, and each is written under a name that is ours: no path, link or
size in the archive decides where anything goes or how much of it.
"""

from __future__ import annotations

import os
import tarfile
import zlib
from collections.abc import Mapping
from hashlib import md5
from pathlib import Path
from typing import IO

from glocal.challenges.disk import writing
from glocal.errors import GlocalError

BLOCK = 1 << 20


def _take(content: IO[bytes], part: Path) -> str:
    """Copy the content to `part`; its MD5."""
    digest = md5(usedforsecurity=False)
    with writing(part):
        file = part.open("wb")
    with file:
        while block := content.read(BLOCK):
            digest.update(block)
            with writing(part):
                file.write(block)
    return digest.hexdigest()


def unpack(archive: Path, wanted: Mapping[str, tuple[Path, int, str]]) -> None:
    """Put every wanted member where it belongs: by its name in the archive, a path, a size in bytes and an MD5."""

    def damaged(why: object) -> GlocalError:
        reason = " ".join(str(why).split())
        return GlocalError(f"{archive} cannot be unpacked: {reason}; put the original file in its place.")

    left = dict(wanted)
    try:
        with tarfile.open(archive, "r|*") as members:
            for member in members:
                if member.name not in left or not member.isreg():
                    continue
                target, size, digest = left.pop(member.name)
                content = members.extractfile(member)
                if member.size != size or content is None:
                    raise damaged(f"{member.name} has {member.size} bytes instead of {size}")
                # Two processes may unpack at once: each writes a part of its own, and either one's is whole.
                part = target.with_name(f"{target.name}.{os.getpid()}.part")
                with writing(part):
                    target.parent.mkdir(parents=True, exist_ok=True)
                try:
                    if _take(content, part) != digest:
                        raise damaged(f"{member.name} has the wrong checksum")
                    with writing(target):
                        os.replace(part, target)
                finally:
                    part.unlink(missing_ok=True)
                if not left:
                    return
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise damaged(str(error) or type(error).__name__) from error
    raise damaged(f"it holds no file {', '.join(left)}")
