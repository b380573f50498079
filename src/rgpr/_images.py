"""Opening images that nobody vouches for: four formats, and a limit on their pixels."""

from __future__ import annotations

import os
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

    # Pillow warns of more pixels than its limit and refuses twice as many. Its warning is shown as
    # always: a filter that made it an error would belong to the process, and images are read in
    # threads.
    bombs = (Image.DecompressionBombError, Image.DecompressionBombWarning)
    try:
        with Image.open(path, formats=_FORMATS) as image:
            most, pixels = Image.MAX_IMAGE_PIXELS, image.width * image.height
            if most is not None and pixels > most:
                raise Image.DecompressionBombError(
                    f"its {pixels} pixels exceed Pillow's limit of {most}"
                )
            image.load()
    except (OSError, SyntaxError, ValueError, MemoryError, *bombs) as error:
        raise UnreadableError(f"{path} cannot be read as an image ({error})") from error
    return image
