"""Operating a federation on Flower: processes, certificates and keys.

::

    keys.py              a certificate authority for the server, a key pair for every site
    registration.py      edits the registry of sites: numbers and names, bound to keys
    flower_processes.py  starts Flower's commands; terminates them and their descendants
    link.py              connection to a SuperLink, and its commands
    superlink.py         a SuperLink, in the foreground
    server_process.py    its process: only the server's own user may start runs
    site_runner.py       a site, in the foreground
    approvals.py         the apps that a site has approved
    site_process.py      its connection to the server, and a fork of its app for every message
    submit.py            submits an app, follows its log, reports its outcome
    local.py             server and sites on this machine, with one command
    status.py            the status of a run, as text
    prometheus.py        metrics for Prometheus, on loopback

`flwr` is run as a command; the processes of server and sites use Flower's library, its internals by
:mod:`nufed.flower.internals`.
"""
