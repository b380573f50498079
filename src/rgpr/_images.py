"""Opening images that nobody vouches for: four formats, and a limit on their pixels."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["ENDINGS", "UnreadableError", "opened"]

ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
# Pillow looks at the content and not at the ending, so a file could choose any of its readers. Most
# of Pillow's vulnerabilities were in readers of other formats than these.
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP")


class UnreadableError(ValueError):
    """An image that cannot be read, with the reason."""


def opened(path: str | os.PathLike[str]) -> Image.Image:
    """The image of a file, with its pixels in memory.

    Raises:
        UnreadableError: It is damaged, of another format, or has more pixels than Pillow's limit.
    """
    from PIL import Image

    bombs = (Image.DecompressionBombError, Image.DecompressionBombWarning)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path, formats=_FORMATS) as image:
                image.load()
    except (OSError, SyntaxError, ValueError, MemoryError, *bombs) as error:
        raise UnreadableError(f"{path} cannot be read as an image ({error})") from error
    return image
