"""The `dynamix` command.

`main` finds the sub-command in `commands`, or among the extensions, and turns errors into exit codes. The other modules
are what several commands share: `arguments`, `output` and `terminal`; `connection`, `jobs`, `services` and `fleet`
for the bus; `documents`, what is shown of a job; `dashboard`, the page.
"""
