#!/bin/bash
#SBATCH --job-name=gangline-run
#SBATCH --partition=gpu
#SBATCH --account=llm
#SBATCH --qos=long
#SBATCH --time=1-00:00:00
#SBATCH --constraint='h100&ib'
#SBATCH --nodes=5
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --output=/shared/runs/one/launch/slurm-%j.out
#SBATCH --open-mode=append
#SBATCH --signal=USR1@120
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --reservation=night

# run, by gangline VERSION. Slurm starts one agent a node; the agents meet in
# the run directory, start the ranks, and go on with the nodes that are left when one is lost.
run_dir=/shared/runs/one
mkdir -p "$run_dir/launch"
rm -f "$run_dir/ending.json" "$run_dir/launch/nodes"  # those of an earlier start

export PYTHONUNBUFFERED=1
export NCCL_LIB_DIR="${NCCL_LIB_DIR:-/usr/local/nvidia/lib64}"
export LD_LIBRARY_PATH="$NCCL_LIB_DIR${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
. "$NCCL_LIB_DIR/nccl-env-profile.sh" || exit 2
module load cuda/13
[ $? -eq 0 ] || { PYTHON -P -m gangline_launch.setup "$run_dir" 'module load cuda/13'; exit 2; }

# What Slurm knows of the nodes: their addresses, their places in the network.
scontrol --oneliner show node "$SLURM_JOB_NODELIST" > "$run_dir/launch/nodes"

# Each agent writes into a file of its own, so that the loss of a node breaks no connection.
srun --ntasks-per-node=1 --kill-on-bad-exit=0 --wait=0 --no-kill --output="$run_dir/launch/node-%n.out" --open-mode=append \
    PYTHON -P -m gangline_launch.agent "$run_dir" --nodes 4:5 --per-node 8 --processes 32

# Again, or not: by RUN_DIR/ending.json.
PYTHON -P -m gangline_launch.slurm.after "$run_dir" $?
