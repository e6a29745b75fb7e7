#!/usr/bin/env bash
# Makes sure that there is a Slurm, of which slow tests start a cluster of their own; its services are not used.
PATH=$PATH:/usr/sbin exec "$(dirname "$0")/debian.sh" slurm-wlm slurmctld
