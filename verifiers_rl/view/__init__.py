"""The page about runs: `vf-rl view` serves it, and writes it as one file.

runs.py     a run's folder, read again when its files change: state, curves, rollouts
browse.py   rollouts by step, reward, environment, error, text; groups; tokens
server.py   the page and these answers over HTTP, on loopback, with a token
one_file.py the page with a sample of the rollouts inside
static/     the page: HTML, CSS and JavaScript that browsers run as it is
"""
