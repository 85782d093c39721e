"""Operating a federation on Flower: processes, certificates and keys.

::

    keys.py              a certificate authority for the server, a key pair for every site
    registration.py      edits the registry of sites: numbers and names, bound to keys
    admission.py         applies the registry to a running SuperLink
    flower_processes.py  starts Flower's commands; terminates them and their descendants
    link.py              connection to a SuperLink, and calls of its API
    superlink.py         a SuperLink, in the foreground
    supernode.py         a site, in the foreground
    site_process.py      its connection to the server
    app_process.py       forks a process of its app for every message
    submit.py            submits an app, follows its log, reports its outcome
    local.py             server and sites on this machine, with one command
    new_app.py           a new app directory from the template

Flower's server and its command line are run by their commands; a site uses its library.
"""
