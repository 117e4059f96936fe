"""Text from a file as a terminal, a page or a message may show it."""

from __future__ import annotations

import unicodedata


def printable(text: str, *, keep: str = "") -> str:
    r"""The text with escapes such as ``\x1b`` for characters that are not printed but obeyed.

    Those are control characters, which move the cursor or ring a bell; marks of direction, which turn what
    follows around; ends of lines; and halves of surrogate pairs, which no encoding can hold.

    Args:
        text: of whatever origin.
        keep: characters that stay as they are.

    Example:
        >>> print(printable("\x1b[31mred, \u202eturned"))
        \x1b[31mred, \u202eturned
    """
    if text.isprintable():
        return text
    return "".join(
        letter
        if letter.isprintable() or letter in keep or unicodedata.category(letter) == "Zs"
        else letter.encode("unicode_escape").decode()
        for letter in text
    )
