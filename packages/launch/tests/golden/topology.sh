#!/bin/bash
#SBATCH --job-name=gangline-run
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --output=/shared/runs/one/launch/slurm-%j.out
#SBATCH --open-mode=append
#SBATCH --signal=USR1@120
#SBATCH --switches=2@12:00:00
#SBATCH --exclusive
#SBATCH --requeue

# run, by gangline VERSION. Slurm starts one agent per node. The agents use
# the run directory to coordinate, start the ranks, and continue with the other nodes if a node is lost.
run_dir=/shared/runs/one
mkdir -p "$run_dir/launch"
rm -f "$run_dir/ending.json" "$run_dir/launch/nodes"  # files of an earlier start

export PYTHONUNBUFFERED=1

# Slurm's record of the nodes: their addresses and their places in the network topology.
scontrol --oneliner show node "$SLURM_JOB_NODELIST" > "$run_dir/launch/nodes"

# Each agent writes its own output file, so that the loss of a node breaks no connection.
srun --ntasks-per-node=1 --kill-on-bad-exit=0 --wait=0 --output="$run_dir/launch/node-%n.out" --open-mode=append \
    PYTHON -P -m gangline_launch.agent "$run_dir" --nodes 8:8 --per-node 8 --processes 64

# Requeue or end the job, as RUN_DIR/ending.json and earlier starts require.
PYTHON -P -m gangline_launch.slurm.after "$run_dir" $?
