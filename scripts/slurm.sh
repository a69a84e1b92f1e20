#!/usr/bin/env bash
# A Slurm of one node on the loopback interface, for the tests: Debian's packages, no systemd.
#
#   scripts/slurm.sh start                 install what lacks, then start; a second call changes nothing
#   scripts/slurm.sh start --accounting    the same with slurmdbd and MariaDB, so that sacct answers
#   scripts/slurm.sh stop                  stop the daemons; packages and configuration stay
#
# Needs root and apt; without them it says so and ends with 0, and the tests of Slurm skip themselves.
# A Slurm that this script did not write is left alone. The node has two GPUs that are none: device nodes that
# read as /dev/null, so that Slurm hands out CUDA_VISIBLE_DEVICES.
set -euo pipefail

MARK="# written by cudagraph-harness scripts/slurm.sh"
CONF=/etc/slurm/slurm.conf
RUN=/run/slurm
LOGS=/var/log/slurm
FAKE_GPUS=/dev/cudagraph-harness
HOST=$(hostname -s)

main() {
    case "${1:-}" in
        start) start "${2:-}" ;;
        stop) refuse_where_impossible && stop ;;
        *) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0" >&2; exit 2 ;;
    esac
}

start() {
    refuse_where_impossible
    local accounting=""
    [ "$1" = --accounting ] && accounting=yes
    install_packages $(packages "$accounting")
    make_folders
    start_munge
    if write_conf "$accounting" || ! node_answers; then
        stop
        [ -z "$accounting" ] || start_accounting
        slurmctld
        slurmd
    fi
    until_ready "an idle node" node_answers
    sinfo
}

stop() {
    for daemon in slurmd slurmctld slurmdbd mariadbd; do stop_daemon "$daemon"; done
}

refuse_where_impossible() {
    local reason=""
    if [ "$(id -u)" != 0 ]; then
        reason="this is not root"
    elif ! command -v apt-get >/dev/null; then
        reason="there is no apt-get"
    elif [ -e "$CONF" ] && ! grep -qF "$MARK" "$CONF"; then
        reason="$CONF belongs to another Slurm"
    fi
    [ -z "$reason" ] || { echo "no Slurm for the tests: $reason; they will be skipped"; exit 0; }
}

packages() {
    echo slurmctld slurmd munge slurm-client
    [ -z "$1" ] || echo slurmdbd mariadb-server slurm-wlm-mysql-plugin
}

install_packages() {
    dpkg -s "$@" >/dev/null 2>&1 && return
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    apt-get install -qq -y --no-install-recommends "$@" >/dev/null
}

make_folders() {
    install -d -o munge -g munge -m 0755 /run/munge
    install -d -m 0755 /etc/slurm /var/spool/slurmctld /var/spool/slurmd "$RUN" "$LOGS" "$FAKE_GPUS"
    for gpu in 0 1; do
        [ -e "$FAKE_GPUS/gpu$gpu" ] || mknod "$FAKE_GPUS/gpu$gpu" c 1 3
    done
}

start_munge() {
    munge -n </dev/null 2>/dev/null | unmunge >/dev/null 2>&1 && return
    if [ ! -s /etc/munge/munge.key ]; then
        (umask 077 && dd if=/dev/urandom of=/etc/munge/munge.key bs=1024 count=1 status=none)
    fi
    chown -R munge:munge /etc/munge /var/log/munge /var/lib/munge
    runuser -u munge -- /usr/sbin/munged --force
}

# Return 0 if the configuration changed, so that the daemons must start anew.
write_conf() {
    local new
    new=$(slurm_conf "$1")
    printf '%s\n' "$MARK" "NodeName=$HOST Name=gpu File=$FAKE_GPUS/gpu[0-1]" >/etc/slurm/gres.conf
    # From 23.11 on slurmd asks systemd for a cgroup, unless told that there is none.
    if dpkg --compare-versions "$(slurmd -V | cut -d' ' -f2)" ge 23.11; then
        printf '%s\n' "$MARK" "CgroupPlugin=disabled" >/etc/slurm/cgroup.conf
    fi
    [ "$new" != "$(cat "$CONF" 2>/dev/null)" ] || return 1
    printf '%s\n' "$new" >"$CONF"
}

slurm_conf() {
    cat <<END
$MARK
ClusterName=local
SlurmctldHost=$HOST(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SlurmctldPort=6817
SlurmdPort=6818
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd
SlurmctldPidFile=$RUN/slurmctld.pid
SlurmdPidFile=$RUN/slurmd.pid
SlurmctldLogFile=$LOGS/slurmctld.log
SlurmdLogFile=$LOGS/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
$(accounting_conf "$1")
JobCompType=jobcomp/none
MpiDefault=none
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
KillWait=5
MinJobAge=300
GresTypes=gpu
NodeName=$HOST NodeAddr=127.0.0.1 CPUs=$(nproc) RealMemory=$(memory_mib) Gres=gpu:2 State=UNKNOWN
PartitionName=debug Nodes=$HOST Default=YES MaxTime=INFINITE State=UP
END
}

accounting_conf() {
    if [ -z "$1" ]; then
        echo "AccountingStorageType=accounting_storage/none"
    else
        printf '%s\n' AccountingStorageType=accounting_storage/slurmdbd AccountingStorageHost=127.0.0.1 AccountingStoragePort=6819
    fi
}

memory_mib() {
    awk '/MemTotal/ {print int($2 / 1024) - 1024}' /proc/meminfo
}

start_database() {
    install -d -o mysql -g mysql -m 0755 /run/mysqld
    [ -d /var/lib/mysql/mysql ] || mariadb-install-db --user=mysql --datadir=/var/lib/mysql >/dev/null
    if ! mysqladmin ping >/dev/null 2>&1; then
        setsid mariadbd --user=mysql --skip-networking --socket=/run/mysqld/mysqld.sock \
            </dev/null >/var/log/mariadbd.log 2>&1 &
        echo $! >"$RUN/mariadbd.pid"
    fi
    until_ready "MariaDB" mysqladmin ping
    mysql -e "create database if not exists slurm_acct_db;
        create user if not exists 'slurm'@'localhost' identified by 'slurm';
        grant all on slurm_acct_db.* to 'slurm'@'localhost';"
    (umask 077 && slurmdbd_conf >/etc/slurm/slurmdbd.conf)
}

slurmdbd_conf() {
    cat <<END
$MARK
AuthType=auth/munge
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort=6819
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm_acct_db
LogFile=$LOGS/slurmdbd.log
PidFile=$RUN/slurmdbd.pid
END
}

# The cluster's name must stand in the database before slurmctld starts.
start_accounting() {
    start_database
    slurmdbd
    until_ready "slurmdbd" sacctmgr -n show cluster
    sacctmgr -i -Q add cluster local >/dev/null || true # each may be there from an earlier start
    sacctmgr -i -Q add account default Cluster=local >/dev/null || true
    sacctmgr -i -Q add user root Account=default >/dev/null || true
}

node_answers() {
    sinfo -h -o %t 2>/dev/null | grep -qE '^(idle|mix|alloc)$'
}

pid_of() {
    cat "$RUN/$1.pid" 2>/dev/null || echo none
}

stop_daemon() {
    local pid
    pid=$(pid_of "$1")
    [ -e "/proc/$pid" ] || return 0
    kill "$pid"
    until_ready "the end of $1" test ! -e "/proc/$pid"
}

until_ready() {
    local what=$1
    shift
    for _ in $(seq 150); do
        "$@" >/dev/null 2>&1 && return
        sleep 0.2
    done
    echo "waited 30 s for $what; the last words of the daemons:" >&2
    tail -n 5 "$LOGS"/*.log >&2 || true
    exit 1
}

main "$@"
