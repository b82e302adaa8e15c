// Tests of the choice of NICs, the placement of threads, and NIC counters, on sysfs trees of real
// machines.
#include "byteps/net/link/nics.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "byteps/base/invariant.h"
#include "byteps/net/link/counters.h"
#include "byteps/net/link/nics.h"
#include "byteps/observe/metrics.h"

namespace ps {
namespace {

// A device of a machine, and its path below /sys/devices.
struct Device {
  const char* name;   // name of an interface, or a GPU's bus id
  const char* place;  // "": virtual
  int numa;
  int mbps;             // rate of an interface; -1: unknown to the kernel
  const char* address;  // "": a GPU
  bool has_carrier = true;
  const char* rdma = "";  // its RDMA device
};
using Machine = std::vector<Device>;
// Cores of each NUMA node, from node 0.
using Cores = std::vector<std::string>;
const Cores kTwoSocketsCores = {"0-15,32-47", "16-31,48-63"};
const Cores kDgxH100Cores = {"0-55,112-167", "56-111,168-223"};

// A virtual machine in a cloud: virtio reports no rate.
const Machine kVirtualMachine = {
    {"lo", "", -1, -1, "127.0.0.1"},
    {"docker0", "", -1, 10'000, "172.17.0.1"},
    {"ens4", "pci0000:00/0000:00:04.0/virtio1", -1, -1, "10.128.0.2"},
};

// A machine with two sockets, a NIC at each, and a NIC for management. It has no GPU.
const Machine kTwoSockets = {
    {"eno1", "pci0000:00/0000:00:1c.0/0000:02:00.0", 0, 1'000, "192.168.1.5"},
    {"ens1", "pci0000:16/0000:16:02.0/0000:17:00.0", 0, 100'000, "10.0.0.5"},
    {"ens2", "pci0000:c9/0000:c9:02.0/0000:ca:00.0", 1, 100'000, "10.0.1.5"},
    {"ens3", "pci0000:c9/0000:c9:04.0/0000:cb:00.0", 1, 100'000, "10.0.2.5", false},
};

// A machine with two RDMA NICs, and an equally fast NIC without RDMA.
const Machine kTwoWithRdma = {
    {"eth0", "pci0000:16/0000:16:02.0/0000:17:00.0", 0, 100'000, "10.0.0.5", true, "mlx5_0"},
    {"eth1", "pci0000:16/0000:16:04.0/0000:18:00.0", 0, 100'000, "10.0.1.5"},
    {"eth2", "pci0000:c9/0000:c9:02.0/0000:ca:00.0", 1, 100'000, "10.0.2.5", true, "mlx5_1"},
};

// DGX H100: a ConnectX-7 below the switch of each GPU, two more for storage and in-band management,
// a 10 Gbit/s port on the board.
const Machine kDgxH100 = {
    {"ibp24s0", "pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:00.0/0000:18:00.0", 0, 400'000,
     "10.1.0.1"},
    {"ibp64s0", "pci0000:37/0000:37:01.0/0000:38:00.0/0000:39:01.0/0000:40:00.0", 0, 400'000,
     "10.1.1.1"},
    {"ibp79s0", "pci0000:48/0000:48:01.0/0000:49:00.0/0000:4a:01.0/0000:4f:00.0", 0, 400'000,
     "10.1.2.1"},
    {"ibp94s0", "pci0000:59/0000:59:01.0/0000:5a:00.0/0000:5b:02.0/0000:5e:00.0", 0, 400'000,
     "10.1.3.1"},
    {"ibp154s0", "pci0000:97/0000:97:01.0/0000:98:00.0/0000:99:00.0/0000:9a:00.0", 1, 400'000,
     "10.1.4.1"},
    {"ibp192s0", "pci0000:b7/0000:b7:01.0/0000:b8:00.0/0000:b9:02.0/0000:c0:00.0", 1, 400'000,
     "10.1.5.1"},
    {"ibp206s0", "pci0000:c7/0000:c7:01.0/0000:c8:00.0/0000:c9:02.0/0000:ce:00.0", 1, 400'000,
     "10.1.6.1"},
    {"ibp220s0", "pci0000:d7/0000:d7:01.0/0000:d8:00.0/0000:d9:02.0/0000:dc:00.0", 1, 400'000,
     "10.1.7.1"},
    {"ens6f0", "pci0000:26/0000:26:01.0/0000:29:00.0", 0, 100'000, "10.2.0.1"},
    {"eno3", "pci0000:00/0000:00:1c.4/0000:0b:00.0", 0, 10'000, "10.3.0.1"},
    {"0000:1b:00.0", "pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:01.0/0000:1b:00.0", 0, 0, ""},
    {"0000:43:00.0", "pci0000:37/0000:37:01.0/0000:38:00.0/0000:39:02.0/0000:43:00.0", 0, 0, ""},
    {"0000:52:00.0", "pci0000:48/0000:48:01.0/0000:49:00.0/0000:4a:02.0/0000:52:00.0", 0, 0, ""},
    {"0000:61:00.0", "pci0000:59/0000:59:01.0/0000:5a:00.0/0000:5b:03.0/0000:61:00.0", 0, 0, ""},
    {"0000:9d:00.0", "pci0000:97/0000:97:01.0/0000:98:00.0/0000:99:01.0/0000:9d:00.0", 1, 0, ""},
    {"0000:c3:00.0", "pci0000:b7/0000:b7:01.0/0000:b8:00.0/0000:b9:03.0/0000:c3:00.0", 1, 0, ""},
    {"0000:d1:00.0", "pci0000:c7/0000:c7:01.0/0000:c8:00.0/0000:c9:03.0/0000:d1:00.0", 1, 0, ""},
    {"0000:df:00.0", "pci0000:d7/0000:d7:01.0/0000:d8:00.0/0000:d9:03.0/0000:df:00.0", 1, 0, ""},
};

// HGX of another vendor: four switches with two GPUs and one NIC each.
const Machine kHgx = {
    {"rail0", "pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:00.0", 0, 200'000, "10.4.0.1"},
    {"rail1", "pci0000:48/0000:48:01.0/0000:49:00.0/0000:4a:00.0", 0, 200'000, "10.4.1.1"},
    {"rail2", "pci0000:97/0000:97:01.0/0000:98:00.0/0000:99:00.0", 1, 200'000, "10.4.2.1"},
    {"rail3", "pci0000:c7/0000:c7:01.0/0000:c8:00.0/0000:c9:00.0", 1, 200'000, "10.4.3.1"},
    {"0000:1a:00.0", "pci0000:15/0000:15:01.0/0000:16:00.0/0000:1a:00.0", 0, 0, ""},
    {"0000:1b:00.0", "pci0000:15/0000:15:01.0/0000:16:00.0/0000:1b:00.0", 0, 0, ""},
    {"0000:4c:00.0", "pci0000:48/0000:48:01.0/0000:49:00.0/0000:4c:00.0", 0, 0, ""},
    {"0000:cc:00.0", "pci0000:c7/0000:c7:01.0/0000:c8:00.0/0000:cc:00.0", 1, 0, ""},
};

// AWS p5: each GPU shares a root complex with four NICs, whose driver reports no rate.
Machine P5() {
  static const char* const kNames[] = {"ens0", "ens1", "ens2", "ens3"};
  static const char* const kPlaces[] = {
      "pci0000:44/0000:44:00.0/0000:45:00.0/0000:46:01.0/0000:4f:00.0",
      "pci0000:44/0000:44:00.0/0000:45:00.0/0000:46:01.1/0000:50:00.0",
      "pci0000:55/0000:55:00.0/0000:56:00.0/0000:57:01.0/0000:60:00.0",
      "pci0000:55/0000:55:00.0/0000:56:00.0/0000:57:01.1/0000:61:00.0"};
  static const char* const kAddresses[] = {"10.5.0.1", "10.5.0.2", "10.5.0.3", "10.5.0.4"};
  Machine machine;
  for (int i = 0; i < 4; ++i) machine.push_back({kNames[i], kPlaces[i], 0, -1, kAddresses[i]});
  machine.push_back(
      {"0000:53:00.0", "pci0000:44/0000:44:00.0/0000:45:00.0/0000:46:02.0/0000:53:00.0", 0, 0, ""});
  machine.push_back(
      {"0000:64:00.0", "pci0000:55/0000:55:00.0/0000:56:00.0/0000:57:02.0/0000:64:00.0", 0, 0, ""});
  return machine;
}

// The part of sysfs that describes such a machine.
class Tree {
 public:
  explicit Tree(const Machine& machine, const Cores& cores = {}) : machine_(machine) {
    char name[] = "/tmp/sysfs.XXXXXX";
    root_ = mkdtemp(name);
    for (const Device& device : machine) Add(device);
    for (size_t i = 0; i < cores.size(); ++i) {
      const std::string folder = root_ + "/devices/system/node/node" + std::to_string(i);
      std::filesystem::create_directories(folder);
      std::ofstream(folder + "/cpulist") << cores[i] << "\n";
    }
  }
  ~Tree() { std::filesystem::remove_all(root_); }

  // Returns what ListNics would return on a host with these interfaces.
  std::vector<HostNic> Nics() {
    std::vector<HostNic> nics;
    for (const Device& device : machine_) {
      if (device.address[0] == 0) continue;
      nics.push_back(ReadNic(device.name, root_));
      nics.back().nic.address = device.address;
      nics.back().nic.prefix = 24;
    }
    return nics;
  }

  // Returns the interfaces that a worker uses or, with `gpu` "server", those that a server uses.
  std::string Choose(const std::string& address, const std::string& gpu, int local_rank = 0,
                     int local_size = 1, const std::string& setting = "auto") {
    NicUser user;
    user.uses_rdma = uses_rdma;
    user.setting = setting;
    user.address = address;
    user.is_worker = gpu != "server";
    user.gpu = ReadDevice(user.is_worker ? gpu : "", root_);
    user.local_rank = local_rank;
    user.local_size = local_size;
    const ChosenNics chosen = ChooseNics(Nics(), user);
    host_mbps = chosen.host_mbps;
    std::string names;
    for (const Nic& nic : chosen.nics) {
      const auto same = std::find_if(machine_.begin(), machine_.end(), [&](const Device& device) {
        return device.address == nic.address;
      });
      names += (names.empty() ? "" : " ") + std::string(same->name);
    }
    return names;
  }

  // Returns the NUMA nodes of `threads` threads of a process with these NICs and cores; -1: none.
  std::vector<int> Place(const std::string& names, int threads, int first_core = 0,
                         int last_core = 1023) {
    std::vector<HostNic> used;
    for (const HostNic& nic : Nics()) {
      if ((" " + names + " ").find(" " + nic.name + " ") != std::string::npos) used.push_back(nic);
    }
    std::set<int> allowed;
    for (int core = first_core; core <= last_core; ++core) allowed.insert(core);
    std::vector<int> numbers;
    cores.clear();
    for (const ThreadPlace& place : PlaceThreads(used, Nodes(), allowed, threads)) {
      numbers.push_back(place.numa);
      cores[place.numa] = place.cores;
    }
    return numbers;
  }
  NumaNodes Nodes() { return ReadNumaNodes(root_); }

  bool uses_rdma = false;
  int host_mbps = 0;  // from the last choice
  NumaNodes cores;    // cores of the threads placed last

 private:
  void Add(const Device& device) {
    namespace fs = std::filesystem;
    const std::string folder = root_ + "/devices/" + device.place;
    if (device.place[0] != 0) {
      fs::create_directories(folder);
      std::ofstream(folder + "/numa_node") << device.numa << "\n";
    }
    if (device.address[0] == 0) {
      fs::create_directories(root_ + "/bus/pci/devices");
      fs::create_directory_symlink(folder, root_ + "/bus/pci/devices/" + device.name);
      return;
    }
    const std::string interface = root_ + "/class/net/" + device.name;
    fs::create_directories(interface);
    if (device.place[0] != 0) fs::create_directory_symlink(folder, interface + "/device");
    if (device.rdma[0] != 0 && device.place[0] != 0) {
      fs::create_directories(folder + "/infiniband/" + device.rdma);
    } else if (device.rdma[0] != 0) {  // software RDMA
      const std::string above = root_ + "/class/infiniband/" + device.rdma;
      fs::create_directories(above);
      std::ofstream(above + "/parent") << device.name << "\n";
    }
    std::ofstream(interface + "/speed") << device.mbps << "\n";
    std::ofstream(interface + "/carrier") << device.has_carrier << "\n";
  }

  const Machine machine_;
  std::string root_;
};

TEST(Nics, AVirtualMachineHasOne) {
  Tree tree(kVirtualMachine);
  EXPECT_EQ(tree.Choose("10.128.0.2", ""), "ens4");
  EXPECT_EQ(tree.host_mbps, 0) << "virtio says no rate, and that of docker0 is made up";
}

TEST(Nics, ThoseOfLoopbackAreNotLookedAt) {
  Tree tree(kTwoSockets);
  EXPECT_EQ(tree.Choose("127.0.0.1", ""), "");
  EXPECT_EQ(tree.Choose("203.0.113.7", ""), "") << "translated on the way";
}

TEST(Nics, AVirtualInterfaceThatLeadsToTheSchedulerIsUsedAlone) {
  Machine machine = kTwoSockets;
  machine.push_back({"bond0", "", -1, 200'000, "10.9.0.5"});
  Tree tree(machine);
  EXPECT_EQ(tree.Choose("10.9.0.5", "server"), "bond0");
  EXPECT_EQ(tree.host_mbps, 0);
}

TEST(Nics, AServerUsesAllThatAreAlike) {
  Tree tree(kTwoSockets);
  // The list has neither the management NIC nor the unplugged NIC.
  EXPECT_EQ(tree.Choose("10.0.0.5", "server"), "ens1 ens2");
  EXPECT_EQ(tree.host_mbps, 200'000);
  EXPECT_EQ(tree.Choose("192.168.1.5", "server"), "ens1 ens2") << "wherever the scheduler is";
}

TEST(Nics, WorkersWithoutGpusShareThem) {
  Tree tree(kTwoSockets);
  EXPECT_EQ(tree.Choose("10.0.0.5", "", 0, 1), "ens1 ens2");
  EXPECT_EQ(tree.Choose("10.0.0.5", "", 0, 2), "ens1");
  EXPECT_EQ(tree.Choose("10.0.0.5", "", 1, 2), "ens2");
  EXPECT_EQ(tree.Choose("10.0.0.5", "", 2, 4), "ens1");
  EXPECT_EQ(tree.host_mbps, 200'000) << "of all workers of the host";
}

TEST(Nics, OneThatIsNamedIsUsedAlone) {
  Tree tree(kTwoSockets);
  NicUser user;
  user.address = "10.0.0.5";
  user.only_own = true;
  const ChosenNics chosen = ChooseNics(tree.Nics(), user);
  ASSERT_EQ(chosen.nics.size(), 1U);
  EXPECT_EQ(chosen.nics[0].address, "10.0.0.5");
  EXPECT_EQ(chosen.host_mbps, 100'000);
}

TEST(Nics, TheSettingNamesThem) {
  Tree tree(kTwoSockets);
  EXPECT_EQ(tree.Choose("10.0.0.5", "", 1, 2, "ens2,eno1"), "ens2 eno1");
  EXPECT_EQ(tree.host_mbps, 101'000);
  try {
    tree.Choose("10.0.0.5", "", 0, 1, "ens1,ens9");
    ADD_FAILURE() << "it knows ens9";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("'ens9' is no interface"), std::string::npos) << e.what();
    EXPECT_NE(std::string(e.what()).find("there are: eno1, ens1, ens2"), std::string::npos);
  }
}

TEST(Nics, OverRdmaAllHaveADevice) {
  Tree tree(kTwoWithRdma);
  EXPECT_EQ(tree.Choose("10.0.0.5", "server"), "eth0 eth1 eth2");
  tree.uses_rdma = true;
  EXPECT_EQ(tree.Choose("10.0.0.5", "server"), "eth0 eth2");
  EXPECT_EQ(tree.host_mbps, 200'000);
  EXPECT_EQ(tree.Choose("10.0.0.5", "", 1, 2), "eth2");
}

TEST(Nics, RdmaDevicesNameTheirInterfaces) {
  Machine machine = kTwoWithRdma;
  machine.push_back({"veth0", "", -1, 10'000, "10.9.0.5", true, "rxe0"});
  Tree tree(machine);
  EXPECT_EQ(tree.Choose("10.0.0.5", "", 0, 1, "mlx5_1,eth0"), "eth2 eth0");
  EXPECT_EQ(tree.Choose("10.0.0.5", "server", 0, 1, "rxe0"), "veth0");
  try {
    tree.Choose("10.0.0.5", "", 0, 1, "mlx5_2");
    ADD_FAILURE() << "it knows mlx5_2";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("eth0 (mlx5_0), eth1, eth2 (mlx5_1), veth0 (rxe0)"),
              std::string::npos)
        << e.what();
  }
}

TEST(Nics, EachGpuOfADgxH100HasItsOwn) {
  Tree tree(kDgxH100);
  static const char* const kGpus[] = {"0000:1b:00.0", "0000:43:00.0", "0000:52:00.0",
                                      "0000:61:00.0", "0000:9d:00.0", "0000:c3:00.0",
                                      "0000:d1:00.0", "0000:df:00.0"};
  static const char* const kNics[] = {"ibp24s0",  "ibp64s0",  "ibp79s0",  "ibp94s0",
                                      "ibp154s0", "ibp192s0", "ibp206s0", "ibp220s0"};
  for (int i = 0; i < 8; ++i) {
    // The launcher may number GPUs in any order.
    EXPECT_EQ(tree.Choose("10.3.0.1", kGpus[i], 7 - i, 8), kNics[i]);
    EXPECT_EQ(tree.host_mbps, 8 * 400'000);
  }
}

TEST(Nics, OneWorkerOfADgxH100UsesAllTheNearestFirst) {
  Tree tree(kDgxH100);
  const std::string nics = tree.Choose("10.3.0.1", "0000:c3:00.0");
  EXPECT_EQ(nics.substr(0, 8), "ibp192s0");
  EXPECT_EQ(std::count(nics.begin(), nics.end(), ' '), 7);
  // Each of two workers gets the four NICs of its socket.
  EXPECT_EQ(tree.Choose("10.3.0.1", "0000:1b:00.0", 0, 2), "ibp24s0 ibp64s0 ibp79s0 ibp94s0");
  EXPECT_EQ(tree.Choose("10.3.0.1", "0000:9d:00.0", 1, 2), "ibp154s0 ibp192s0 ibp206s0 ibp220s0");
}

TEST(Nics, TwoGpusOfAnHgxShareTheOneOfTheirSwitch) {
  Tree tree(kHgx);
  EXPECT_EQ(tree.Choose("10.4.0.1", "0000:1a:00.0", 0, 8), "rail0");
  EXPECT_EQ(tree.Choose("10.4.0.1", "0000:1b:00.0", 1, 8), "rail0");
  EXPECT_EQ(tree.Choose("10.4.0.1", "0000:4c:00.0", 2, 8), "rail1");
  EXPECT_EQ(tree.Choose("10.4.0.1", "0000:cc:00.0", 7, 8), "rail3");
}

TEST(Nics, GpusOfAP5UseTheCardsOfTheirRoot) {
  Tree tree(P5());
  EXPECT_EQ(tree.Choose("10.5.0.1", "0000:53:00.0", 0, 2), "ens0 ens1");
  EXPECT_EQ(tree.Choose("10.5.0.1", "0000:64:00.0", 1, 2), "ens2 ens3");
  EXPECT_EQ(tree.Choose("10.5.0.1", "server"), "ens0 ens1 ens2 ens3");
  EXPECT_EQ(tree.host_mbps, 0);
}

using Numbers = std::vector<int>;

TEST(Numa, CoresOfEachNode) {
  const NumaNodes nodes = Tree(kTwoSockets, kTwoSocketsCores).Nodes();
  ASSERT_EQ(nodes.size(), 2U);
  EXPECT_EQ(nodes.at(0).size(), 32U);
  EXPECT_EQ(*nodes.at(1).begin(), 16);
  EXPECT_EQ(*nodes.at(1).rbegin(), 63);
  EXPECT_TRUE(Tree(kTwoSockets).Nodes().empty()) << "a kernel without NUMA";
  // The memory of some GPUs is a NUMA node without cores.
  EXPECT_EQ(Tree(kTwoSockets, {"0-71", "72-143", "", ""}).Nodes().size(), 2U);
}

TEST(Numa, ThreadsRunOnTheNodeOfTheirNic) {
  Tree tree(kDgxH100, kDgxH100Cores);
  EXPECT_EQ(tree.Place("ibp192s0", 3), Numbers({1, 1, 1}));
  EXPECT_EQ(tree.cores[1], tree.Nodes().at(1));
  EXPECT_EQ(tree.Place("ibp24s0", 2), Numbers({0, 0}));
  // A server uses all eight NICs.
  const std::string all = tree.Choose("10.3.0.1", "server");
  EXPECT_EQ(tree.Place(all, 8), Numbers({0, 1, 0, 1, 0, 1, 0, 1}));
  EXPECT_EQ(tree.Place(all, 3), Numbers({0, 1, 0}));
  EXPECT_EQ(tree.Place(all, 1), Numbers({-1})) << "it serves NICs of both";
  EXPECT_EQ(Tree(kHgx, kDgxH100Cores).Place("rail2", 2), Numbers({1, 1}));
  EXPECT_EQ(Tree(P5(), {"0-47,96-143", "48-95,144-191"}).Place("ens0 ens1", 2), Numbers({0, 0}));
}

TEST(Numa, NodesGetThreadsByTheRateOfTheirNics) {
  Machine machine = kTwoSockets;
  machine.push_back({"ens4", "pci0000:16/0000:16:04.0/0000:18:00.0", 0, 200'000, "10.0.4.5"});
  Tree tree(machine, kTwoSocketsCores);
  EXPECT_EQ(tree.Place("ens1 ens2 ens4", 4), Numbers({0, 1, 0, 0}));
}

TEST(Numa, TheCoresThatTheProcessMayUseAreKeptTo) {
  Tree tree(kTwoSockets, kTwoSocketsCores);
  EXPECT_EQ(tree.Place("ens1 ens2", 2, 10, 20), Numbers({0, 1}));
  EXPECT_EQ(tree.cores[0], std::set<int>({10, 11, 12, 13, 14, 15}));
  EXPECT_EQ(tree.cores[1], std::set<int>({16, 17, 18, 19, 20}));
  EXPECT_EQ(tree.Place("ens2", 2, 0, 15), Numbers({-1, -1})) << "bound to the other node";
  EXPECT_EQ(tree.Place("ens2", 3, 0, 17), Numbers({-1, -1, -1})) << "two cores for three threads";
}

TEST(Numa, ThreadsRunAnywhereWhereNothingIsKnown) {
  EXPECT_EQ(Tree(kVirtualMachine, {"0-7"}).Place("ens4", 2), Numbers({-1, -1})) << "one node";
  EXPECT_EQ(Tree(kVirtualMachine, kTwoSocketsCores).Place("ens4", 1), Numbers({-1}))
      << "the hypervisor does not tell the NIC's";
  EXPECT_EQ(Tree(kTwoSockets).Place("ens1", 1), Numbers({-1}));
  EXPECT_EQ(Tree(kTwoSockets, kTwoSocketsCores).Place("", 1), Numbers({-1})) << "no NIC";
  // A virtual interface has no NUMA node: the NICs below it are not considered.
  Machine machine = kTwoSockets;
  machine.push_back({"bond0", "", -1, 200'000, "10.9.0.5"});
  EXPECT_EQ(Tree(machine, kTwoSocketsCores).Place("bond0", 2), Numbers({-1, -1}));
}

TEST(Nics, OfThisHostEachHasAnAddress) {
  const auto nics = ListNics();
  const auto loopback = std::find_if(
      nics.begin(), nics.end(), [](const HostNic& nic) { return nic.nic.address == "127.0.0.1"; });
  ASSERT_NE(loopback, nics.end());
  EXPECT_EQ(loopback->nic.prefix, 8);
  EXPECT_FALSE(loopback->is_device);
  EXPECT_EQ(loopback->nic.mbps, 0);
}

// ----- NIC for which traffic is counted

NicReading Reading(const std::string& nic) {
  const auto readings = ReadNicCounters();
  const auto found = std::find_if(readings.begin(), readings.end(),
                                  [&](const NicReading& one) { return one.nic == nic; });
  return found == readings.end() ? NicReading() : *found;
}

TEST(NicCounters, AreThoseOfTheInterfaceWithTheAddress) {
  for (const HostNic& nic : ListNics()) {
    EXPECT_EQ(CountersOfNic(nic.nic.address, "203.0.113.7")->nic, nic.name);
    EXPECT_EQ(InterfaceOf(nic.nic.address), nic.name);
  }
  EXPECT_EQ(CountersOfNic("203.0.113.9", "203.0.113.7")->nic, "unknown");
}

TEST(NicCounters, WhatStaysInTheHostGoesOverLoopback) {
  for (const HostNic& nic : ListNics()) {
    EXPECT_EQ(CountersOfNic(nic.nic.address, nic.nic.address)->nic, "lo");
  }
  EXPECT_EQ(CountersOfNic("127.0.0.1", "127.0.0.2")->nic, "lo");
}

TEST(NicCounters, ConnectionsOverANicShareThem) {
  NicCounters* const counters = CountersOfNic("127.0.0.1", "127.0.0.1");
  EXPECT_EQ(CountersOfNic("127.0.0.1", "127.0.0.2"), counters);
  const NicReading before = Reading("lo");
  counters->bytes_sent += 5;
  counters->bytes_received += 7;
  EXPECT_EQ(Reading("lo").bytes_sent, before.bytes_sent + 5);
  EXPECT_EQ(Reading("lo").bytes_received, before.bytes_received + 7);
}

TEST(NicCounters, AreMetricsWithTheNicAsALabel) {
  const auto metrics = byteps::core::Tell({NicReading{"eth0", 1, 2}, NicReading{"eth1", 3, 4}});
  ASSERT_EQ(metrics.size(), 4U);
  static const char* const kNames[] = {"byteps_nic_sent_bytes_total",
                                       "byteps_nic_received_bytes_total"};
  static const double kValues[] = {1, 3, 2, 4};
  for (size_t i = 0; i < metrics.size(); ++i) {
    EXPECT_EQ(metrics[i].name, kNames[i / 2]);
    ASSERT_EQ(metrics[i].labels.size(), 1U);
    EXPECT_EQ(metrics[i].labels[0].first, "nic");
    EXPECT_EQ(metrics[i].labels[0].second, i % 2 == 0 ? "eth0" : "eth1");
    EXPECT_EQ(metrics[i].value, kValues[i]);
  }
}

}  // namespace
}  // namespace ps
