#!/usr/bin/env bash
# Installs the requirements of tests/slurm (Slurm's daemons and commands, munge, shellcheck) on
# Debian or Ubuntu, as root, if they are missing. On other systems it prints the reason and
# succeeds; the tests are then skipped with their reason. No service is left running.
set -euo pipefail

wanted=()
for pair in slurmctld:slurmctld slurmd:slurmd sbatch:slurm-client munged:munge shellcheck:shellcheck; do
  PATH="$PATH:/usr/sbin:/sbin" command -v "${pair%%:*}" >/dev/null || wanted+=("${pair##*:}")
done
if [ ${#wanted[@]} -eq 0 ]; then
  exit 0
fi
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
  echo "tests/slurm/install.sh: ${wanted[*]} missing; only root on Debian or Ubuntu can have them installed here, so the Slurm tests are skipped"
  exit 0
fi

# Installing a package starts its daemons unless this file forbids it.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
  trap 'rm -f "$policy"' EXIT
  printf '#!/bin/sh\nexit 101\n' >"$policy"
  chmod 755 "$policy"
fi
install() {
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${wanted[@]}"
}
log=$(mktemp)
echo "tests/slurm/install.sh: installing ${wanted[*]}"
if ! { install || { apt-get update -qq && install; }; } >"$log" 2>&1; then
  tail -n 5 "$log"
  echo "tests/slurm/install.sh: ${wanted[*]} could not be installed (above: apt-get's last words), so the Slurm tests are skipped"
fi
rm -f "$log"
