# slurm/site.sh   What is the same for all jobs of this cluster. Sourced on the first node of each job.

# ---- where laminar is: an environment that all nodes see, or a container ---------------------------------------------
VENV=${VENV:-$SLURM_SUBMIT_DIR/.venv}
SRUN=()          # more options of srun, as for Pyxis: (--container-image=/shared/laminar.sqsh --container-mounts=/shared:/shared)
CONTAINER=()     # before each command on a node, as for Apptainer: (apptainer exec --nv --bind /shared /shared/laminar.sif)
                 # or Charliecloud: (ch-run --write --bind /shared:/shared /shared/laminar --)
# with either of them: VENV=

# ---- the controller's store: a folder on a local disk of its node, never on NFS or Lustre -----------------------------
STORE_DIR=${STORE_DIR:-${TMPDIR:-/tmp}/laminar-$(id -un)}

# ---- network ----------------------------------------------------------------------------------------------------------
# The interface at which the nodes reach each other: control messages, gloo, and NCCL's own sockets. Without it the address is
# that of the node's name, and NCCL chooses by itself.
#export LAMINAR_INTERFACE=ib0
# NCCL's adapters for RDMA, where it should not take all of them; of these each GPU takes the one nearest to it (NUMA).
#export NCCL_IB_HCA=mlx5_0,mlx5_1,mlx5_2,mlx5_3
