"""The page: boards and captures as JSON documents, and a web server that shows them; for `dynamix dashboard`.

In: a `Fleet` (the boards of all jobs on a bus) or captures. Out: HTTP on one address: a page without a build step, its
data as JSON, and server-sent events. It only reads.

`documents` and `alarms` are pure: change there what is shown. `captured` folds a capture into a board up to any moment.
`access` decides who may read. `server` is the shell: routes, events, uvicorn. `page/` is what a browser runs: HTML,
CSS, ES modules, and uPlot with its licence in `page/vendor/`.
"""
