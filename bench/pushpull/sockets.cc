// Plain TCP sockets with the traffic of a push-pull: every worker sends its share of a tensor to
// each server, and at the same time receives as many bytes from it. No values are added. The
// engine's speed is compared with this program's.
//
// A pair of processes has several connections (flows). Each has a sending and a receiving thread,
// which use blocking calls on whole shares: no epoll and no copies. Threads tell each other only
// "go" and "done".
//
// bench/pushpull/backends.py compiles this file twice: as a library for the workers, which call
// sockets_connect, sockets_push_pull and sockets_close; and as the server:
//
//   sockets ADDRESS PORT_FILE CONNECTIONS
//
// The server listens on a port that the kernel chooses, writes it to PORT_FILE, serves CONNECTIONS
// connections, and ends when all have ended. In a round, the worker sends a count of 8 bytes, then
// that number of bytes. As soon as the server has the count, it sends as many bytes from its own
// buffer.
#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace {

// Bytes per call: so many that calls cost nothing, and so few that the receiver handles them while
// they are in the cache.
constexpr size_t kCall = 1 << 20;
// Up to this size, waking a second thread does not pay.
constexpr size_t kSmall = 64 << 10;

[[noreturn]] void Die(const std::string& what) {
  fprintf(stderr, "sockets: %s: %s\n", what.c_str(), strerror(errno));
  exit(1);
}

bool SendAll(int fd, const char* data, size_t bytes) {
  while (bytes > 0) {
    const ssize_t sent = send(fd, data, std::min(bytes, kCall), MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent <= 0) return false;
    data += sent;
    bytes -= sent;
  }
  return true;
}

bool ReceiveAll(int fd, char* data, size_t bytes) {
  while (bytes > 0) {
    const ssize_t got = recv(fd, data, std::min(bytes, kCall), 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) {
      if (got == 0) errno = ECONNRESET;
      return false;
    }
    data += got;
    bytes -= got;
  }
  return true;
}

// First sends the count and the bytes in one call, so that a small push is a single packet.
bool SendCounted(int fd, const char* data, uint64_t bytes) {
  iovec parts[2] = {{&bytes, sizeof(bytes)},
                    {const_cast<char*>(data), std::min<size_t>(bytes, kCall)}};
  msghdr message = {};
  message.msg_iov = parts;
  message.msg_iovlen = 2;
  const ssize_t sent = sendmsg(fd, &message, MSG_NOSIGNAL);
  // A socket with room takes the whole count.
  if (sent < static_cast<ssize_t>(sizeof(bytes))) return false;
  const size_t done = sent - sizeof(bytes);
  return SendAll(fd, data + done, bytes - done);
}

void NoDelay(int fd) {
  const int on = 1;
  if (setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on)) != 0) Die("TCP_NODELAY");
}

// A thread that does one piece of work at a time.
class Worker {
 public:
  Worker() : thread_([this] { Loop(); }) {}
  ~Worker() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // `run` sends or receives. Wait returns its result, with its errno in the calling thread.
  void Give(bool (*run)(int, char*, size_t), int fd, char* data, size_t bytes) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      run_ = run;
      fd_ = fd;
      data_ = data;
      bytes_ = bytes;
    }
    changed_.notify_all();
  }
  bool Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return run_ == nullptr; });
    if (error_ != 0) errno = error_;
    return error_ == 0;
  }

 private:
  void Loop() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return stopping_ || run_ != nullptr; });
      if (run_ == nullptr) return;
      const auto run = run_;
      lock.unlock();
      const int error = run(fd_, data_, bytes_) ? 0 : errno;
      lock.lock();
      error_ = error;
      run_ = nullptr;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  bool (*run_)(int, char*, size_t) = nullptr;
  int fd_ = -1;
  char* data_ = nullptr;
  size_t bytes_ = 0;
  int error_ = 0;
  bool stopping_ = false;
  std::thread thread_;  // the last member, because the thread uses all others
};

bool Send(int fd, char* data, size_t bytes) { return SendCounted(fd, data, bytes); }
bool SendBack(int fd, char* data, size_t bytes) { return SendAll(fd, data, bytes); }
bool Receive(int fd, char* data, size_t bytes) { return ReceiveAll(fd, data, bytes); }

// Serves a connection until the worker closes it.
void Serve(int fd) {
  Worker answers;
  std::vector<char> pushed, sum;
  uint64_t count = 0;
  while (ReceiveAll(fd, reinterpret_cast<char*>(&count), sizeof(count))) {
    if (pushed.size() < count) {
      pushed.resize(count);
      sum.resize(count, 1);
    }
    if (count > kSmall) {
      answers.Give(SendBack, fd, sum.data(), count);
    } else if (!SendBack(fd, sum.data(), count)) {
      Die("sending");
    }
    if (!ReceiveAll(fd, pushed.data(), count) || !answers.Wait()) Die("a round was cut off");
  }
  close(fd);
}

struct Flow {
  int fd;
  std::unique_ptr<Worker> sender, receiver;
};

// A worker's connections, by server, then by flow.
struct Job {
  size_t flows;
  std::vector<Flow> all;
};

int Connect(const std::string& address, const std::string& port) {
  addrinfo hints = {}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  if (getaddrinfo(address.c_str(), port.c_str(), &hints, &found) != 0) return -1;
  const int fd = socket(found->ai_family, found->ai_socktype, found->ai_protocol);
  const bool good = fd >= 0 && connect(fd, found->ai_addr, found->ai_addrlen) == 0;
  freeaddrinfo(found);
  if (good) return fd;
  if (fd >= 0) close(fd);
  return -1;
}

// Computes the range of part `index` of `parts` in `bytes`.
void Share(size_t bytes, size_t parts, size_t index, size_t* begin, size_t* length) {
  *begin = bytes / parts * index + std::min(index, bytes % parts);
  *length = bytes / parts + (index < bytes % parts);
}

}  // namespace

extern "C" {

// Connects `flows` times to each of `servers`, which are "address port" separated by newlines.
// Returns null and sets errno if a server cannot be reached.
void* sockets_connect(const char* servers, size_t flows) {
  auto job = std::make_unique<Job>();
  job->flows = flows;
  std::string rest = servers;
  while (!rest.empty()) {
    const size_t end = std::min(rest.find('\n'), rest.size());
    const std::string line = rest.substr(0, end);
    rest.erase(0, end + 1);
    const size_t space = line.find(' ');
    for (size_t i = 0; i < flows; ++i) {
      const int fd = Connect(line.substr(0, space), line.substr(space + 1));
      if (fd < 0) {
        for (const Flow& flow : job->all) close(flow.fd);
        return nullptr;
      }
      NoDelay(fd);
      job->all.push_back({fd, std::make_unique<Worker>(), std::make_unique<Worker>()});
    }
  }
  return job.release();
}

// Sends `bytes` from `pushed`, evenly to the servers and their flows, and receives as many into
// `pulled`. Returns the bytes received, or -1 and sets errno.
int64_t sockets_push_pull(void* handle, char* pushed, char* pulled, size_t bytes) {
  Job* job = static_cast<Job*>(handle);
  const size_t servers = job->all.size() / job->flows;
  // A small push uses one flow per server, from this thread.
  const size_t flows = bytes / servers > kSmall ? job->flows : 1;
  size_t begin, length;
  for (bool sending : {true, false}) {
    for (size_t i = 0; i < servers * flows; ++i) {
      const Flow& flow = job->all[i / flows * job->flows + i % flows];
      Share(bytes, servers * flows, i, &begin, &length);
      if (length > kSmall) {
        const auto& thread = sending ? flow.sender : flow.receiver;
        thread->Give(sending ? Send : Receive, flow.fd, (sending ? pushed : pulled) + begin,
                     length);
      } else if (!(sending ? Send(flow.fd, pushed + begin, length)
                           : Receive(flow.fd, pulled + begin, length))) {
        return -1;
      }
    }
  }
  bool good = true;
  for (const Flow& flow : job->all) {
    good = flow.sender->Wait() && good;
    good = flow.receiver->Wait() && good;
  }
  return good ? static_cast<int64_t>(bytes) : -1;
}

void sockets_close(void* handle) {
  Job* job = static_cast<Job*>(handle);
  for (const Flow& flow : job->all) close(flow.fd);
  delete job;
}

}  // extern "C"

int main(int argc, char** argv) {
  if (argc != 4) {
    fprintf(stderr, "usage: sockets ADDRESS PORT_FILE CONNECTIONS\n");
    return 2;
  }
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  socklen_t length = sizeof(address);
  if (inet_pton(AF_INET, argv[1], &address.sin_addr) != 1) Die(argv[1]);
  if (listener < 0 || bind(listener, reinterpret_cast<sockaddr*>(&address), length) != 0 ||
      listen(listener, SOMAXCONN) != 0 ||
      getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length) != 0) {
    Die(std::string("listening on ") + argv[1]);
  }
  // The file is first written under another name, so that readers see it whole.
  const std::string part = std::string(argv[2]) + ".part";
  FILE* file = fopen(part.c_str(), "w");
  if (file == nullptr) Die(part);
  fprintf(file, "%s %d\n", argv[1], ntohs(address.sin_port));
  if (fclose(file) != 0 || rename(part.c_str(), argv[2]) != 0) Die(part);
  std::vector<std::thread> threads;
  for (int left = atoi(argv[3]); left > 0; --left) {
    const int fd = accept(listener, nullptr, nullptr);
    if (fd < 0) Die("accept");
    NoDelay(fd);
    threads.emplace_back(Serve, fd);
  }
  close(listener);
  for (std::thread& thread : threads) thread.join();
  return 0;
}
