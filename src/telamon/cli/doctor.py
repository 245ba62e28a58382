"""`telamon doctor`: what this machine has, and what is missing."""


def doctor() -> None:
    """Print versions, devices, memory and disk, and what is missing for TPU, GPU and the extras.

    ```
    telamon doctor
    ```
    """
    from rich.console import Console
    from rich.table import Table

    from telamon.watch.doctor import examine

    table = Table(show_header=False, box=None)
    table.add_column(style="bold", no_wrap=True)
    for finding in examine():
        table.add_row(finding.subject, finding.state)
        if finding.advice:
            table.add_row("", f"→ {finding.advice}", style="yellow")
    Console().print(table, markup=False)
