#!/usr/bin/env bash
# Agents in jobs of real Slurm: scancel, time limit, early SIGUSR1, requeue, a node that dies (tests/python/test_slurm.py), and the commands that keep a fleet (test_cluster.py, test_controller_job.py). Starts Slurm's
# daemons itself, on free ports and with all state in a temporary folder, and ends them. Needs root and Debian's slurmctld, slurmd,
# slurm-client and munge; without them it says so and ends with 77. Takes the program from HOSTLER_BIN, else target/release, else target/debug.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../python"

skip() {
    echo "skipped: $*"
    exit 77
}

[ "$(id -u)" -eq 0 ] || skip "Slurm starts jobs only as root"
for program in munged slurmctld slurmd sbatch; do
    command -v "$program" >/dev/null || skip "$program is missing (Debian: slurmctld, slurmd, slurm-client, munge)"
done
exec "$(./venv.sh)" -m pytest -m slurm test_slurm.py test_cluster.py test_controller_job.py "$@"
