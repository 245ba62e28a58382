"""A conversation with a model, turn by turn."""

import re
from collections.abc import Callable
from typing import Any

from telamon.data.chat import ChatEncoder
from telamon.data.chat_template import FILE
from telamon.data.tokenizer import TextTokenizer
from telamon.errors import ConfigError, DataError, TelamonError
from telamon.infer.engine import Generator
from telamon.infer.run import OpenedRun
from telamon.infer.sampling import Sampling
from telamon.infer.text import Completion, complete_ids

RESET, QUIT = "/reset", "/quit"


class Chat:
    """The turns so far, and a model that answers the next one.

    Args:
        generator: the model; it ends its turns at the tokens it was made with.
        encoder: the model's template and tokenizer.
        context: most tokens that a conversation may have.
        max_tokens: most tokens of an answer.
        system: what is said before the first turn; none: what the template says.
    """

    def __init__(
        self,
        generator: Generator,
        encoder: ChatEncoder,
        *,
        context: int,
        max_tokens: int,
        sampling: Sampling,
        seed: int = 0,
        system: str | None = None,
    ):
        if max_tokens < 1:
            raise ConfigError(f"max_tokens={max_tokens} is not possible; give 1 or more")
        self._generator, self._encoder, self._context, self._max_tokens = generator, encoder, context, max_tokens
        self._sampling, self._seed, self._system = sampling, seed, system
        self.messages: list[dict[str, Any]] = []
        self.reset()

    def reset(self) -> None:
        """Forget all turns."""
        self.messages = [] if self._system is None else [{"role": "system", "content": self._system}]

    def answer(self, text: str, *, on_text: Callable[[str], None]) -> Completion:
        """The model's answer to a message; both become part of the conversation, what was shown of it too where Ctrl-C cuts it off.

        Args:
            text: the user's message.
            on_text: called with each piece of the answer as it comes.

        Raises:
            ConfigError: the conversation fills the context; it stays as it was.
            DataError: the message is not text, or the template refuses the conversation; it stays as it was.
        """
        asked = [*self.messages, {"role": "user", "content": text}]
        ids = self._encoder.prompt(asked)
        if not ids:
            raise DataError(f"{self._encoder.template.origin} renders this conversation as an empty text, which a model cannot continue")
        room = self._context - len(ids)
        if room < 1:
            raise ConfigError(
                f"the conversation has {len(ids):,} tokens with this message, and the model was trained on {self._context:,} at a time, which "
                f"leaves none for an answer; {RESET} begins a new conversation"
            )
        pieces: list[str] = []

        def show(_: int, piece: str) -> None:
            pieces.append(piece)
            on_text(piece)

        try:
            (completion,) = complete_ids(
                self._generator,
                self._encoder.tokenizer,
                [ids],
                max_tokens=min(self._max_tokens, room),
                sampling=self._sampling,
                seed=self._seed,
                on_text=show,
            )
        finally:
            self.messages = [*asked, {"role": "assistant", "content": "".join(pieces)}]
        return completion


def chat_with(
    opened: OpenedRun,
    *,
    max_tokens: int,
    sampling: Sampling,
    seed: int = 0,
    system: str | None = None,
) -> Chat:
    """A chat with an opened run.

    Raises:
        ConfigError: it has no template, or its data were never text.
    """
    if not isinstance(opened.tokenizer, TextTokenizer):
        raise ConfigError(f"{opened.folder} was trained on ids that were never text, so that there is nothing to talk about")
    if opened.template is None:
        raise ConfigError(
            f"{opened.folder} has no chat template, so that the model does not know turns; --template FILE gives one (Jinja, as a {FILE} of Hugging Face)"
        )
    encoder = ChatEncoder(opened.tokenizer, opened.template)
    ends = () if encoder.end_of_turn is None else (encoder.end_of_turn,)
    return Chat(
        opened.generator(also_ends=ends),
        encoder,
        context=opened.context,
        max_tokens=max_tokens,
        sampling=sampling,
        seed=seed,
        system=system,
    )


def converse(
    chat: Chat,
    *,
    read: Callable[[], str | None],
    write: Callable[[str], None],
    note: Callable[[str], None],
    forgiving: bool,
) -> None:
    """Messages in, answers out, until there are no more.

    Args:
        chat: the conversation.
        read: the next message, without its newline; none: there is none.
        write: shows a piece of an answer; a newline ends each.
        note: shows a line about the conversation.
        forgiving: show what goes wrong with a message and go on, as for people, instead of raising it; a command that is none is not said
            to the model.
    """
    while (text := read()) is not None:
        command = text.strip()
        if command == QUIT:
            return
        if command == RESET:
            chat.reset()
            note("a new conversation")
        elif forgiving and re.fullmatch("/[a-z]+", command):
            note(f"there is no {command}; {RESET} begins a new conversation, {QUIT} ends")
        elif command:
            try:
                completion = chat.answer(text, on_text=write)
                write("\n")
                if completion.finish == "length":
                    note(f"(cut off after {len(completion.tokens)} tokens)")
            except KeyboardInterrupt:
                if not forgiving:
                    raise
                write("\n")
            except TelamonError as error:
                if not forgiving:
                    raise
                note(str(error))
