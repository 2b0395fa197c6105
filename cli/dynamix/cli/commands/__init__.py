"""The sub-commands of `dynamix`: a module each, or a folder where a part needs torch, rich or much code.

A command's docstring is `dynamix NAME --help`; `configure(parser)` declares the arguments, from `dynamix.cli.arguments`
where several commands share them; `run(arguments)` does the work and returns the exit code. It imports rich,
matplotlib, torch and the laboratory inside of `run`, so that `--help` stays fast. A new command is a new module and its
line in `dynamix.cli.main.COMMANDS`; one of another package is an entry point of the group `dynamix.commands`. Commands
do not import each other: what two of them need is a module of `dynamix.cli`.
"""
