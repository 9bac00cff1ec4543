#!/bin/bash
# Prolog= in slurm.conf: as root, on each node, before a job. It must never fail: a failing prolog drains the node.
set -u
bin=${SENTINEL_BIN:-/opt/sentinel/bin/sentinel}
socket=${SENTINEL_SOCKET:-/run/sentinel/sentinel.sock}

# On a healthy node the service is running. Where it is not, runs start daemons of their own.
if [ -x "$bin" ] && [ ! -S "$socket" ] && command -v systemctl >/dev/null; then
  systemctl start sentinel.service || logger -t sentinel "the service did not start; runs of job ${SLURM_JOB_ID:-?} start their own daemons"
fi
exit 0
