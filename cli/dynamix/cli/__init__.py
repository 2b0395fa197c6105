"""The `dynamix` command.

`main` finds the sub-command in `commands` and turns errors into exit codes. The other modules are what several commands
share; `board` (a job while it runs) and `inspection` (a captured job) compute without a terminal, so that any other
display can use them. Only the modules named `view` and `figure`, and `tables`, import rich and matplotlib.
"""
