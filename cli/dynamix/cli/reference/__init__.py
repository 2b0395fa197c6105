"""docs/reference.md, made of the code: `commands` lists what each command takes, `settings` what each process reads.

In: the parsers of `dynamix.cli.commands` and the structs of settings. Out: Markdown; a test holds the page against it.
"""
