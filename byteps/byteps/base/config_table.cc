// Table of all settings.
#include "byteps/base/config.h"

namespace byteps {
namespace core {
namespace {

std::vector<Variable> MakeTable() {
  using V = Variable;
  const auto kInt = V::kInt;
  const auto kFloat = V::kFloat;
  const auto kBool = V::kBool;
  const auto kString = V::kString;
  const auto kChoice = V::kChoice;
  const auto kLauncher = V::kLauncher;
  const auto kInternal = V::kInternal;
  return {
      {"DMLC_ROLE", kChoice, "", "worker", 0, 0, "worker|server|scheduler",
       "Role of this process. `byteps-server` uses it when --role is not given; Python processes "
       "are workers."},
      {"DMLC_PS_ROOT_URI", kString, "", "", 0, 0, "",
       "Host name or address of the scheduler. Without it a worker starts its own scheduler and "
       "servers (embedded mode)."},
      {"DMLC_PS_ROOT_PORT", kInt, "port", "0", 0, 65535, "",
       "Port of the scheduler. On the scheduler itself 0 lets the kernel choose; see --port-file."},
      {"DMLC_NUM_WORKER", kInt, "workers", "1", 1, kMaxInt, "",
       "Number of workers in the job. Workers use WORLD_SIZE if the launcher sets it."},
      {"DMLC_NUM_SERVER", kInt, "servers", "1", 1, 65536, "", "Number of servers in the job."},
      {"DMLC_WORKER_ID", kInt, "", "0", 0, kMaxInt, "", "Rank of this worker; RANK wins.",
       kLauncher},
      {"DMLC_NODE_HOST", kString, "", "", 0, 0, "",
       "Address at which other nodes reach this process. Default: the address of DMLC_INTERFACE."},
      {"DMLC_INTERFACE", kString, "", "", 0, 0, "",
       "Network interface at whose address other nodes reach this process. Default: the one that "
       "leads to the scheduler."},
      {"BYTEPS_NICS", kString, "", "auto", 0, 0, "",
       "Interfaces that carry data, such as eth0,eth1, or RDMA devices, such as mlx5_0,mlx5_1. "
       "auto: the NICs that are at least half as fast as the fastest; a worker uses those "
       "nearest to its GPU. If DMLC_INTERFACE or DMLC_NODE_HOST names an interface, or a virtual "
       "one leads to the scheduler, auto uses only this one."},
      {"BYTEPS_NODE_PORT", kInt, "port", "0", 0, 65535, "",
       "Port at which a server listens; a firewall must let workers reach it. 0: the kernel "
       "chooses. Workers listen nowhere."},
      {"DMLC_USE_KUBERNETES", kBool, "", "0", 0, 1, "",
       "The scheduler listens on every address. Set it if DMLC_PS_ROOT_URI is the address of a "
       "service in front of the scheduler."},
      {"DMLC_ENABLE_RDMA", kChoice, "", "tcp", 0, 0, "tcp|0|ibverbs|1",
       "Transport: tcp (or 0), or ibverbs (or 1) for RDMA over InfiniBand or RoCE. The same on all "
       "nodes."},
      {"RANK", kInt, "", "0", 0, kMaxInt, "", "Rank of this worker, set by torchrun.", kLauncher},
      {"WORLD_SIZE", kInt, "workers", "1", 1, kMaxInt, "", "Workers in the job, set by torchrun.",
       kLauncher},
      {"LOCAL_RANK", kInt, "", "0", 0, kMaxInt, "",
       "Rank of this worker on its host, set by torchrun.", kLauncher},
      {"LOCAL_WORLD_SIZE", kInt, "workers", "1", 1, kMaxInt, "",
       "Workers on this host, set by torchrun.", kLauncher},
      {"BYTEPS_LOCAL_RANK", kInt, "", "0", 0, kMaxInt, "", "Taken before LOCAL_RANK.", kLauncher},
      {"BYTEPS_LOCAL_SIZE", kInt, "workers", "1", 1, kMaxInt, "", "Taken before LOCAL_WORLD_SIZE.",
       kLauncher},
      {"BYTEPS_REPLICA", kString, "", "", 0, 0, "",
       "NUMBER/COUNT: this job is one of COUNT replicas of a model, which meet only at the "
       "servers. NUMBER begins at 0. Each replica has the same number of workers; the scheduler "
       "counts those of all replicas. worker.sh --replica sets this."},
      {"BYTEPS_QUORUM", kString, "", "", 0, 0, "",
       "REPLICAS@SECONDS, the quorum of bps.init() and --dpu-quorum: once so many replicas have "
       "pushed, the others have so long.",
       kInternal},
      {"BYTEPS_EMBEDDED_SERVERS", kInt, "servers", "1", 1, 256, "",
       "Embedded mode: number of servers on each host. One server uses all NICs of its host. By "
       "default hosts with faster NICs start more servers, in proportion."},
      {"BYTEPS_HOST_ID", kString, "", "", 0, 0, "",
       "Name of this host. Workers with the same name share a NIC and reach each other without "
       "the NIC. Default: the host's name and the kernel's boot id."},
      {"BYTEPS_PEER_TIMEOUT_S", kFloat, "s", "30", 0.1, 86400, "",
       "A peer that is silent for this long is lost, and the job fails. (A closed connection is "
       "noticed at once.)"},
      {"BYTEPS_START_TIMEOUT_S", kFloat, "s", "30", 0.1, 86400, "",
       "The scheduler must answer within this time. After the first worker has registered, every "
       "other node must register within this time of the previous one."},
      {"BYTEPS_RECONNECT_TIMEOUT_S", kFloat, "s", "30", 0, 86400, "",
       "If a connection breaks, over TCP or RDMA, its nodes connect again and repeat what was in "
       "flight. After this long without success the peer is lost, and the job fails. 0: at once."},
      {"BYTEPS_OP_TIMEOUT_S", kFloat, "s", "600", 0.1, 604800, "",
       "A push_pull that takes longer fails and names the ranks that did not push. It does not "
       "fail while a lost server or scheduler may return."},
      {"BYTEPS_STOP_TIMEOUT_S", kFloat, "s", "25", 0, 3600, "",
       "How long a scheduler or server that gets SIGTERM waits for workers to save and leave. A "
       "second SIGTERM ends it."},
      {"BYTEPS_KEEP", kBool, "", "0", 0, 1, "",
       "Scheduler and servers: same as `byteps-server --keep`. They survive a failure of the job "
       "and accept its restart, with any number of workers; DMLC_NUM_WORKER is ignored."},
      {"BYTEPS_KEEP_TIMEOUT_S", kFloat, "s", "1800", 0, 604800, "",
       "A scheduler with --keep ends if no worker comes for this long after a failure. 0: it waits "
       "forever."},
      {"BYTEPS_REPLACE_SERVERS_S", kFloat, "s", "0", 0, 604800, "",
       "How long a job waits for another server after one is lost. Workers then keep each sum in "
       "host memory until all workers have it. The same on all nodes. 0: the loss ends the job."},
      {"BYTEPS_BACKUP_STATE", kBool, "", "0", 0, 1, "",
       "Each server keeps a copy of another server's optimizer state, so that a lost server can "
       "be replaced. The same on all nodes."},
      {"BYTEPS_SCHEDULER_RETURN_S", kFloat, "s", "0", 0, 604800, "",
       "How long the nodes of a running job wait until a scheduler that died is started again at "
       "its address. The new scheduler waits as long for all nodes. The same on all nodes. 0: "
       "its death ends the job."},
      {"BYTEPS_LINK_GBPS", kFloat, "Gbit/s", "0", 0, 1e6, "",
       "Rate of all NICs of a worker's host together, each way. The cost model, the length of "
       "partitions (longer on fast links) and BYTEPS_CONNECTIONS depend on it. 0: the rate that "
       "the NICs of BYTEPS_NICS report, if they are real. All workers use the slowest host's "
       "rate; if one is unknown, they use none."},
      {"BYTEPS_SERVER_LINK_GBPS", kFloat, "Gbit/s", "0", 0, 1e6, "",
       "Rate of a server's NICs together, each way, for the cost model. 0: same as "
       "BYTEPS_LINK_GBPS.",
       kInternal},
      {"BYTEPS_MEASURE_LINKS", kBool, "", "1", 0, 1, "",
       "Before training, ranks on several hosts reduce a scratch tensor of at most 64 MiB through "
       "servers and by NCCL or gloo, interleaved, to choose the faster backend. 0 on any worker, "
       "or BYTEPS_LINK_GBPS: nothing is measured, and the rates of the NICs decide."},
      {"BYTEPS_LOCAL_SERVERS", kInt, "servers", "0", 0, 256, "",
       "For the cost model: number of servers on each worker's host. They share its NIC; all "
       "others are on server machines. In embedded mode all servers are local. The same on all "
       "workers."},
      {"BYTEPS_SERVERS_PER_MACHINE", kInt, "servers", "0", 0, 256, "",
       "Servers on each server machine, for the cost model, where their addresses do not tell. 0: "
       "by their addresses. The same on all workers.",
       kInternal},
      {"BYTEPS_PARTITION_BYTES", kInt, "bytes", "4096000", 1, 1073741824, "",
       "Longest partition of a tensor, rounded up to whole pages. The same on all workers."},
      {"BYTEPS_MIN_PARTITION_BYTES", kInt, "bytes", "0", 0, 1073741824, "",
       "Shortest partition of a tensor (except its last one), rounded up to whole pages, or "
       "BYTEPS_PARTITION_BYTES if that is less. 0: 131072, on links known to be slow what they "
       "carry in 2.5 ms, at least 32768. A tensor is cut into 64 partitions per server, so "
       "that results return early, or fewer on links known to be fast (BYTEPS_LINK_GBPS). The same "
       "on all workers.",
       kInternal},
      {"BYTEPS_NODE_PIECE_BYTES", kInt, "bytes", "1048576", 1, 1073741824, "",
       "Where the ranks of a host reduce first, a tensor is cut into at most 8 pieces, of which "
       "each rank pushes at least this much. The same on all workers.",
       kInternal},
      {"BYTEPS_PUSH_THREAD", kInt, "threads", "4", 1, 64, "",
       "Number of push threads of a worker, and of its pull threads. Push threads take "
       "partitions by priority, enqueue copies from the GPU, and send. Pull threads copy results "
       "that did not arrive in place, and enqueue copies to the GPU."},
      {"BYTEPS_SERVER_WINDOW_BYTES", kInt, "bytes", "0", 0, 1e12, "",
       "Bytes that a worker may have in flight to each server. Other partitions wait, and those "
       "of higher priority can overtake them. 0: two partitions, or the server's share of the "
       "bytes that all servers together take in 5 ms if that is more. The share counts as at "
       "most 16 MiB, and over RDMA always as 16 MiB."},
      {"BYTEPS_PINNED_BYTES", kInt, "bytes", "268435456", 1, 1e15, "",
       "Pinned host memory of a worker, through which partitions of GPU tensors pass. A worker "
       "takes what its declared tensors need: at most this, and at least one partition of "
       "BYTEPS_PARTITION_BYTES."},
      {"BYTEPS_STREAMED_BYTES", kInt, "bytes", "4294967296", 0, 1e15, "",
       "Pinned host memory of a worker with sums that streams of its GPU wait for, as in "
       "torch.distributed. Such a sum holds all of its bytes until it has landed; one that finds "
       "no room blocks the host when it is awaited.",
       kInternal},
      {"BYTEPS_KEY_HASH_FN", kChoice, "", "raw", 0, 0, "raw|djb2",
       "How partitions are spread over servers. raw: round robin from the tensor's placement. The "
       "same on all workers."},
      {"BYTEPS_SERVER_ENGINE_THREAD", kInt, "threads", "4", 1, 256, "",
       "Number of threads of a server that add. A partition stays with one thread. Default in "
       "embedded mode: what the host's NICs need, in half of the cores that its ranks leave."},
      {"BYTEPS_DETERMINISTIC", kBool, "", "0", 0, 1, "",
       "Servers add in the order of ranks instead of arrival. Runs then agree bit for bit. This "
       "costs some waiting and memory."},
      {"BYTEPS_SERVER_WIDE_FLOAT32", kBool, "", "1", 0, 1, "",
       "Servers add more than two fp32 values in fp64 and round once, so that no result is less "
       "accurate than an all-reduce's. 0: in fp32, with half the memory for a reduction in "
       "flight.",
       kInternal},
      {"BYTEPS_SERVER_STATE_BYTES", kInt, "bytes", "0", 0, 1e15, "",
       "Memory that a server may use for optimizer state: 12 bytes per parameter for AdamW, plus "
       "2 or 4 with speculative steps. A declaration that needs more is refused. 0: the memory "
       "that is free on its machine, or in its container, when it starts. Set it if several "
       "servers share a machine."},
      {"BYTEPS_IO_THREADS", kInt, "threads", "0", 0, 64, "",
       "Number of threads of a process that move bytes over TCP. 0: a quarter of the host's "
       "cores per worker, at most 8; for servers in embedded mode, what the host's NICs need."},
      {"BYTEPS_KEEP_BF16_BYTES", kInt, "bytes", "65536", 0, 1e12, "",
       "What --dpu-reduce-keep-bf16 and keep_bytes of ServerOptimizer say where they are given.",
       kInternal},
      {"BYTEPS_STOCHASTIC_ROUNDING", kBool, "", "0", 0, 1, "",
       "Where values travel as int8 or int4: round them up or down by chance, so that the mean is "
       "the value, instead of to the nearest. Chance depends on the tensor's name, its round, the "
       "rank and the place in the tensor alone. The same on all workers.",
       kInternal},
      {"BYTEPS_CONNECTIONS", kInt, "connections", "0", 0, 64, "",
       "Number of connections between a worker and each server that carry values, at least one "
       "per NIC. 0: over RDMA one; over TCP one per 10 Gbit/s that the two exchange if the NIC "
       "is the limit (BYTEPS_LINK_GBPS; 40 if its rate is unknown, 100 inside a host), at most "
       "BYTEPS_IO_THREADS."},
      {"BYTEPS_RECEIVE_POOL_BYTES", kInt, "bytes", "1073741824", 0, 1e15, "",
       "Unused memory for values received over TCP that a process keeps for reuse.", kInternal},
      {"BYTEPS_C10D", kBool, "", "0", 0, 1, "",
       "Process groups of torch.distributed send large all-reduces through the servers, in "
       "scripts that do not know BytePS. torch reads this when it is imported."},
      {"BYTEPS_C10D_BACKEND", kChoice, "", "auto", 0, 0, "auto|flat|node-first|collective",
       "How process groups and DDP hooks reduce. auto: as the bytes over each NIC decide; flat: "
       "every rank pushes whole tensors; node-first: the ranks of a host reduce first; "
       "collective: NCCL or gloo. The same on all workers."},
      {"BYTEPS_C10D_MIN_BYTES", kInt, "bytes", "65536", 1, 1e12, "",
       "Shortest tensor that process groups and DDP hooks send through the servers. The same on "
       "all workers.",
       kInternal},
      {"BYTEPS_C10D_WIRE_DTYPE", kChoice, "", "same", 0, 0, "same|bf16|fp16|int8|int4",
       "Type in which process groups and DDP hooks send tensors. bf16 and fp16 apply to fp32 and "
       "fp64; int8 and int4 apply to all types but fp64. The servers add in fp32. The same on "
       "all workers."},
      {"BYTEPS_FSDP_DTYPES", kChoice, "", "none", 0, 0,
       "none|same|bf16|int8|int4|none,int8|bf16,int8|int8,int8|int4,int8",
       "With BYTEPS_C10D=1: the type in which FSDP2 sends gradients through the servers; none "
       "leaves gradients with NCCL or gloo. A second type is that in which NCCL or gloo gather "
       "parameters over hosts. The same on all workers."},
      {"BYTEPS_RDMA_DEVICE", kString, "", "", 0, 0, "",
       "NAME[:PORT[:GID]]: the only RDMA device, such as mlx5_0, with its port and GID. On RoCE "
       "the GID also selects the version. Default of each part: that of DMLC_NODE_HOST or "
       "DMLC_INTERFACE, else of the address that leads to the scheduler."},
      {"BYTEPS_RDMA_TRAFFIC_CLASS", kInt, "", "-1", -1, 255, "",
       "Traffic class of RDMA packets; on RoCE, DSCP times 4. -1: the system's default."},
      {"BYTEPS_RDMA_MTU", kChoice, "bytes", "0", 0, 0, "0|256|512|1024|2048|4096",
       "Largest packet of an RDMA connection; the smaller of both nodes' values applies. 0: the "
       "path's.",
       kInternal},
      {"BYTEPS_RDMA_START_DEPTH", kInt, "requests", "64", 4, 65535, "",
       "Sends in flight on each RDMA endpoint.", kInternal},
      {"BYTEPS_RDMA_RX_DEPTH", kInt, "slots", "128", 8, 65535, "",
       "Receives posted on each RDMA endpoint.", kInternal},
      {"BYTEPS_RDMA_SLOT_BYTES", kInt, "bytes", "536870912", 65536, 1e15, "",
       "Locked memory for sends and receives of all RDMA endpoints of a process, 1024 + "
       "BYTEPS_RDMA_INLINE_BYTES for each. With many peers both depths are lowered until they fit, "
       "though never below 4 and 8.",
       kInternal},
      {"BYTEPS_RDMA_INLINE_BYTES", kInt, "bytes", "4096", 0, 1048576, "",
       "Values of at most this many bytes are sent with their message into a slot; larger ones are "
       "written into memory that the receiver offers. The same on all nodes.",
       kInternal},
      {"BYTEPS_RDMA_POOL_BYTES", kInt, "bytes", "1073741824", 0, 1e15, "",
       "Unused registered memory for received values that a process keeps for reuse.", kInternal},
      {"BYTEPS_RDMA_WINDOW_BYTES", kInt, "bytes", "1048576", 16384, 1e9, "",
       "Values that a data endpoint may have handed to the device without their having arrived: "
       "enough to keep the link busy, and no more, since what lets the peer send queues behind "
       "them.",
       kInternal},
      {"BYTEPS_RDMA_RECEIVE_WINDOW_BYTES", kInt, "bytes", "16777216", 0, 1e15, "",
       "Values that a peer may have in flight to each RDMA endpoint, or one if that is larger; "
       "others wait. It limits the memory that a server needs per worker.",
       kInternal},
      {"BYTEPS_RDMA_BUSY_POLL", kBool, "", "0", 0, 1, "",
       "Threads that handle RDMA completions never sleep: lower latency for two busy cores.",
       kInternal},
      {"BYTEPS_RDMA_DATA_PLANE", kBool, "", "1", 0, 1, "",
       "Pushes and pulls have RDMA connections of their own. 0: they share the control plane's.",
       kInternal},
      {"BYTEPS_AUTH", kBool, "", "1", 0, 1, "",
       "Nodes prove to each other that they have the job's secret. 0: anybody who reaches a "
       "node's port can use the node. The same on all nodes."},
      {"BYTEPS_SECRET_FILE", kString, "", "", 0, 0, "",
       "File with the job's secret, the same on all nodes; `byteps-server --new-secret FILE` makes "
       "one."},
      {"BYTEPS_SECRET", kString, "", "", 0, 0, "",
       "The job's secret itself, at least 16 bytes, instead of a file. Never printed."},
      {"BYTEPS_TLS", kBool, "", "0", 0, 1, "",
       "Encrypt all TCP connections between nodes with TLS 1.3, by the machine's OpenSSL 3. "
       "Peers authenticate by the job's secret, or by certificates if BYTEPS_TLS_CERT is set. "
       "The same on all nodes. RDMA cannot be encrypted."},
      {"BYTEPS_TLS_CERT", kString, "", "", 0, 0, "",
       "This node's certificate as a PEM file, with its chain up to BYTEPS_TLS_CA. It needs "
       "BYTEPS_TLS_KEY and BYTEPS_TLS_CA. Set it on all nodes or on none."},
      {"BYTEPS_TLS_KEY", kString, "", "", 0, 0, "",
       "Private key of BYTEPS_TLS_CERT, as a PEM file without a password."},
      {"BYTEPS_TLS_CA", kString, "", "", 0, 0, "",
       "Certificates of the authorities that sign the nodes' certificates, as a PEM file. With "
       "BYTEPS_AUTH=0 such a certificate is enough to join the job."},
      {"BYTEPS_METRICS_PORT", kInt, "port", "0", 0, 65535, "",
       "Serve Prometheus metrics at this port plus the local rank: LOCAL_RANK of a worker, "
       "BYTEPS_LOCAL_RANK of a server. 0: off."},
      {"BYTEPS_STATUS_PORT", kInt, "port", "0", 0, 65535, "",
       "Port at which the scheduler shows the cluster's status: a page, and JSON at /status. 0: "
       "off."},
      {"BYTEPS_HTTP_HOST", kString, "", "", 0, 0, "",
       "Address of this host that serves metrics or the scheduler's status, without "
       "authentication. Default for metrics: 127.0.0.1 and the address at which other nodes "
       "reach this process. Default for the status: 127.0.0.1. 0.0.0.0: all addresses."},
      {"BYTEPS_HEALTH_SOCKET", kString, "", "", 0, 0, "",
       "Path of a Unix socket at which a scheduler or server answers `byteps-server --health`. "
       "Default: none."},
      {"BYTEPS_CHECK_GRADIENTS", kBool, "", "0", 0, 1, "",
       "With --dpu-optimizer and --overlap-grad-reduce: send copies of gradients during the "
       "backward pass, and fail in the step if a gradient has changed since. For debugging: the "
       "copies take memory."},
      {"BYTEPS_TRACE_ON", kBool, "", "0", 0, 1, "",
       "Record what happens to each partition, and write it for Perfetto when the job ends."},
      {"BYTEPS_TRACE_STEPS", kString, "", "", 0, 0, "",
       "FIRST-LAST: rounds of each tensor that are recorded, counted from 0. Default: all, up to "
       "100000 partitions, which take about 60 MB."},
      {"BYTEPS_TRACE_START_STEP", kInt, "", "0", 0, kMaxInt, "",
       "Upstream's name for the first of BYTEPS_TRACE_STEPS.", kInternal},
      {"BYTEPS_TRACE_END_STEP", kInt, "", "2147483647", 0, kMaxInt, "",
       "Upstream's name for the last of BYTEPS_TRACE_STEPS.", kInternal},
      {"BYTEPS_TRACE_DIR", kString, "", ".", 0, 0, "",
       "Folder for the timelines, byteps-worker-0.json and so on. It is created if missing."},
      {"BYTEPS_TRACE_LIMIT", kInt, "partitions", "100000", 1, 100000000, "",
       "Partitions that a process records at most, the first ones.", kInternal},
      {"BYTEPS_TRIAL", kString, "", "", 0, 0, "",
       "Set by `python -m byteps.trial`: ranks measure their steps, and end after some.",
       kInternal},
      {"BYTEPS_LOG_LEVEL", kChoice, "", "WARNING", 0, 0, "TRACE|DEBUG|INFO|WARNING|ERROR|FATAL",
       "Least severity that is logged. Default: INFO for the scheduler and servers, WARNING for "
       "workers."},
      {"BYTEPS_LOG_FORMAT", kChoice, "", "text", 0, 0, "text|json",
       "Format of log lines, each with time, severity, role, rank and host. json: one object per "
       "line."},
      {"BYTEPS_LOG_HIDE_TIME", kBool, "", "0", 0, 1, "", "Log without date and time.", kInternal},
      {"PS_VERBOSE", kInt, "", "0", 0, 3, "",
       "Log ps-lite's control messages (1) and all messages (2).", kInternal},
  };
}

}  // namespace

const std::vector<GoneVariable>& Config::Gone() {
  static const auto* gone = new std::vector<GoneVariable>{
      {"BYTEPS_GRACE_S",
       "--dpu-quorum REPLICAS@SECONDS, or bps.init(quorum=\"REPLICAS@SECONDS\"), has both"},
      {"BYTEPS_METRICS_HOST", "set BYTEPS_HTTP_HOST"},
      {"BYTEPS_RDMA_DATA_ENDPOINTS", "set BYTEPS_CONNECTIONS"},
      {"BYTEPS_RDMA_GID_INDEX", "set BYTEPS_RDMA_DEVICE=NAME:PORT:GID, or ::GID"},
      {"BYTEPS_RDMA_PORT", "set BYTEPS_RDMA_DEVICE=NAME:PORT, or :PORT"},
      {"BYTEPS_STATUS_HOST", "set BYTEPS_HTTP_HOST"},
      {"BYTEPS_TCP_CONNECTIONS", "set BYTEPS_CONNECTIONS"},
  };
  return *gone;
}

const std::vector<Variable>& Config::Table() {
  static const auto* table = new std::vector<Variable>(MakeTable());
  return *table;
}

}  // namespace core
}  // namespace byteps
