"""Stop strings in a text that comes in pieces. Pure: knows neither tokens nor HTTP."""


class StopScanner:
    """Lets text through up to the first stop string, and never a character that it would regret.

    What may be the start of a stop string is held until the next characters decide, nothing else
    is. Of several strings that one piece completes, the one that starts first counts; of those
    that start together, the one listed first. With `is_stop_shown` the text ends behind the stop
    string, else in front of it.
    """

    def __init__(self, strings: tuple[str, ...], is_stop_shown: bool) -> None:
        self._automata = [_Automaton(string) for string in strings]
        self._first_characters = frozenset(string[0] for string in strings)
        self._is_stop_shown = is_stop_shown
        self._held = ""
        #: characters at the end of the text that may be the start of a stop string
        self._matched = 0
        self.found: str | None = None

    @property
    def is_holding(self) -> bool:
        """Text is held that may be the start of a stop string."""
        return bool(self._held)

    def push(self, text: str, is_armed: bool = True) -> str:
        """The text that may leave now; sets `found` when it is the last.

        Strings that end in a piece which comes unarmed do not count.
        """
        assert self.found is None, f"text after {self.found!r}"
        if not self._matched and self._first_characters.isdisjoint(text):
            return text
        already = len(self._held)
        buffer = self._held + text
        # (start, place in the list, end), relative to the buffer
        stops = [
            (already + end - len(automaton.string), place, already + end)
            for place, automaton in enumerate(self._automata)
            if (end := automaton.advance(text, is_armed)) is not None
        ]
        if stops:
            start, place, end = min(stops)
            self.found = self._automata[place].string
            self._held = ""
            return buffer[: end if self._is_stop_shown else start]
        self._matched = max(automaton.matched for automaton in self._automata)
        # A shown stop string takes nothing back, so that nothing has to be held for it.
        cut = len(buffer) - (0 if self._is_stop_shown else self._matched)
        self._held = buffer[cut:]
        return buffer[:cut]

    def flush(self) -> str:
        """What is still held when no more text comes: it was no stop string after all."""
        held, self._held = self._held, ""
        return held


class _Automaton:
    """Knuth, Morris and Pratt: the longest start of the string that the text so far ends with."""

    def __init__(self, string: str) -> None:
        assert string, "an empty string stops nothing"
        self.string = string
        self.matched = 0
        #: by matched characters: how many of the string's first ones they also end with
        self._borders = [0, 0]
        for character in string[1:]:
            self._borders.append(self._next(self._borders[-1], character))

    def advance(self, text: str, is_armed: bool) -> int | None:
        """Take the text. The end in it of the first occurrence, if that counts."""
        first_end = None
        for end, character in enumerate(text, 1):
            self.matched = self._next(self.matched, character)
            if self.matched == len(self.string):
                self.matched = self._borders[-1]
                if first_end is None and is_armed:
                    first_end = end
        return first_end

    def _next(self, matched: int, character: str) -> int:
        while matched and self.string[matched] != character:
            matched = self._borders[matched]
        return matched + 1 if self.string[matched] == character else 0
