"""`telamon generate`: continue prompts with a trained run."""

from typing import Annotated

import typer

from telamon.cli.arguments import AllowMismatch, Greedy, Imports, Seed, Temperature, TopK, TopP, sampling_of


def generate(
    prompts: Annotated[list[str], typer.Argument(metavar="PROMPT...", help="Texts to continue.", show_default=False)],
    run: Annotated[str | None, typer.Option(help="A run directory, or its name below runs/; none: the newest.", show_default=False)] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens each prompt gets.")] = 64,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    greedy: Greedy = False,
    stop: Annotated[
        list[str] | None, typer.Option(help=r"End before this text; \n and \t are read as in Python. May be repeated.", show_default=False)
    ] = None,
    seed: Seed = 0,
    allow_mismatch: AllowMismatch = False,
    imports: Imports = None,
) -> None:
    r"""Continue prompts with a trained run.

    ```
    telamon generate "def main("
    telamon generate --run runs/night "import " "class " --max-tokens 100 --top-p 0.95 --stop "\n\n"
    ```
    """
    import time

    from telamon.infer.run import find_run, open_run
    from telamon.infer.text import complete

    sampling = sampling_of(temperature=temperature, top_k=top_k, top_p=top_p, greedy=greedy, seed=seed)
    opened = open_run(find_run(run), imports=tuple(imports or ()), allow_mismatch=allow_mismatch)
    typer.secho(f"{opened.folder}, step {opened.step}", dim=True, err=True)
    screen = _Screen(prompts)
    start = time.perf_counter()
    completions = complete(
        opened.generator(),
        opened.tokenizer,
        prompts,
        max_tokens=max_tokens,
        sampling=sampling,
        stop=[_unescape(text) for text in stop or ()],
        seed=seed,
        context=opened.context,
        on_text=screen.add,
    )
    screen.close()
    seconds = time.perf_counter() - start
    count = sum(len(completion.tokens) for completion in completions)
    ends = ", ".join(completion.finish for completion in completions)
    typer.secho(f"{count} tokens in {seconds:.1f} s, compilation included; ended by: {ends}", dim=True, err=True)


class _Screen:
    """Shows texts one after the other while all of them grow: the first as it comes, the others when it is their turn."""

    def __init__(self, prompts: list[str]):
        self._prompts, self._waiting = prompts, [""] * len(prompts)
        self._begun = False

    def add(self, number: int, text: str) -> None:
        if number == 0:
            self._begin()
            typer.echo(text, nl=False)
        else:
            self._waiting[number] += text

    def close(self) -> None:
        self._begin()
        typer.echo()
        for prompt, text in list(zip(self._prompts, self._waiting, strict=True))[1:]:
            typer.echo()
            typer.secho(prompt, bold=True, nl=False)
            typer.echo(text)

    def _begin(self) -> None:
        # Not before the first text comes: until then the prompts may still be refused.
        if not self._begun:
            typer.secho(self._prompts[0], bold=True, nl=False)
        self._begun = True


def _unescape(text: str) -> str:
    for written, meant in (("\\n", "\n"), ("\\t", "\t")):
        text = text.replace(written, meant)
    return text
