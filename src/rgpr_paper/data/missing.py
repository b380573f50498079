"""The error for a data set that is not there, which says how to get it."""

from __future__ import annotations

__all__ = ["MissingDataError"]


class MissingDataError(FileNotFoundError):
    """A data set is not in any of the places that were searched.

    Args:
        what: The set's name and part, such as ``"CIFAR10 (test)"``.
        where: The places that were searched.
        remedy: A sentence with the command that gets the set.

    Attributes:
        remedy: A message without the places. Reports keep it, because places belong to one machine.
    """

    def __init__(self, what: str, where: str, remedy: str) -> None:
        super().__init__(f"{what} is missing: looked for {where}. {remedy}")
        self.remedy = f"{what} is missing. {remedy}"

    @classmethod
    def no_folder(cls, what: str, remedy: str) -> MissingDataError:
        """The error for a user who named no folder of data sets at all."""
        where = "it nowhere, as no folder was named"
        return cls(what, where, f"Name the folder of data sets, --data ROOT. {remedy}")
