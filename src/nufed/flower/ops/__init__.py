"""Operating a federation on Flower: processes, certificates and keys.

::

    keys.py              a certificate authority for the server, a key pair for every site
    registration.py      edits the registry of sites: numbers and names, bound to keys
    admission.py         applies the registry to a running SuperLink
    flower_processes.py  starts Flower's commands; terminates them and their descendants
    link.py              connection to a SuperLink, and its commands
    control_api.py       registers keys at a SuperLink
    superlink.py         a SuperLink, in the foreground
    server_process.py    its process: only the server's own user may start runs
    site_runner.py       a site, in the foreground
    approvals.py         the apps that a site has approved
    app_bundle.py        an app as Flower sends it, and its digest
    site_process.py      its connection to the server
    refused_connection.py  why the server refuses it, logged once
    site_health.py       whether it is connected
    app_process.py       forks a process of its app for every message
    submit.py            submits an app, follows its log, reports its outcome
    local.py             server and sites on this machine, with one command
    status.py            the status of a run, as text
    prometheus.py        metrics for Prometheus, on loopback
    new_app.py           a new app directory from the template

`flwr` is run as a command; the processes of server and sites use Flower's library.
"""
