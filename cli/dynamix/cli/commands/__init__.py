"""The sub-commands of `dynamix`, a folder each, all of one shape.

    commands/NAME/__init__.py   first line: the summary in `dynamix --help`; then what comes in and goes out
    commands/NAME/command.py    its docstring is `dynamix NAME --help`; `configure(parser)` declares the arguments,
                                `run(arguments)` does the work and returns the exit code
    commands/NAME/view...       what prints (rich); figure.py: what draws (matplotlib); nothing else imports these two
    other modules               what the command computes, without a terminal

A command imports its view, torch and the laboratory inside `run`, so that `--help` stays fast. A new command is a new
folder and its name in `dynamix.cli.main.COMMANDS`. Commands do not import each other: what two of them need is a module
of `dynamix.cli`, or a room of its own (`board`, `inspection`). `tests/cli/test_shape.py` holds all of this.
"""
