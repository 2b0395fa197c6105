"""The page of `dynamix dashboard`: jobs and captures as JSON, and a web server that shows them; it only reads.

`documents` is pure: change there what is shown. `server` is the shell: routes, events, uvicorn, and the `Gate` that
decides who may read. `page/` is what a browser runs: HTML, CSS, ES modules, and uPlot with its licence in
`page/vendor/`.
"""
