"""Running a federation on Flower: its processes, certificates and keys.

::

    keys.py        a certificate authority for the server, a key pair for every site
    processes.py   starts Flower's commands, and ends them and all that they started
    link.py        how a SuperLink is reached, and what it is asked
    server.py      a SuperLink, in the foreground
    site.py        a SuperNode, in the foreground
    run.py         submits an app, follows it, says how it ended
    local.py       all of it on this machine, with one command

Flower is started by its own commands and not imported.
"""
