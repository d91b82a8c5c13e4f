#!/usr/bin/env bash
# Install Slurm from Debian and start a one-machine cluster of two nodes in the folder given; "stop" ends it.
#   tools/engines/slurm.sh start FOLDER    then: SLURM_CONF=FOLDER/slurm.conf srun -N 2 -n 2 …
#   tools/engines/slurm.sh stop FOLDER
set -euo pipefail
action=${1:?start or stop} folder=$(realpath -m "${2:?a folder for the cluster}")

stop() {
  for name in slurmctld slurmd-node0 slurmd-node1 munged; do
    if [[ -f $folder/$name.pid ]]; then kill "$(cat "$folder/$name.pid")" 2>/dev/null || true; fi
  done
}

start() {
  if ! command -v slurmctld >/dev/null || ! command -v munged >/dev/null; then
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq slurm-wlm munge >/dev/null
  fi
  mkdir -p "$folder"/{state,spool-node0,spool-node1}
  local host cores
  host=$(hostname -s) cores=$(nproc)
  dd if=/dev/urandom bs=1 count=1024 of="$folder/munge.key" status=none
  chmod 700 "$folder"
  chmod 400 "$folder/munge.key"
  cat >"$folder/slurm.conf" <<CONF
ClusterName=tests
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/pgid
TaskPlugin=task/none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool-%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd-%n.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd-%n.log
SlurmctldPort=16817
NodeName=node0 NodeHostname=$host NodeAddr=127.0.0.1 Port=16821 CPUs=$cores State=UNKNOWN
NodeName=node1 NodeHostname=$host NodeAddr=127.0.0.1 Port=16822 CPUs=$cores State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
CONF
  chown -R root "$folder"
  munged --force --key-file="$folder/munge.key" --socket="$folder/munge.socket" \
    --pid-file="$folder/munged.pid" --log-file="$folder/munged.log" --seed-file="$folder/munged.seed"
  SLURM_CONF=$folder/slurm.conf slurmctld
  for node in node0 node1; do SLURM_CONF=$folder/slurm.conf slurmd -N "$node"; done
  for _ in $(seq 30); do
    if SLURM_CONF=$folder/slurm.conf timeout 5 srun -N 2 -n 2 true 2>/dev/null; then return; fi
    sleep 1
  done
  tail -n 20 "$folder"/*.log >&2
  echo "slurm did not come up in 30 s" >&2
  exit 1
}

"$action"
