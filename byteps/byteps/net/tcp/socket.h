// Sockets: how they listen, connect and send, and their options.
#ifndef BYTEPS_NET_TCP_SOCKET_H_
#define BYTEPS_NET_TCP_SOCKET_H_

#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cstddef>
#include <string>

#include "byteps/net/link/net_address.h"
#include "byteps/net/tcp/fd.h"

namespace ps {
namespace tcp {

// Listens at `address`; with port 0 the kernel chooses, and `port` tells.  Throws
// Error with the reason.
Fd Listen(const Address& address, int* port);

// Begins to connect, from the address `from` of this host (empty: any); the socket is writable when
// that has ended.  Empty when it failed at once, with errno set.
Fd BeginConnect(const Address& address, const std::string& from = "");

// What became of it: 0, or an errno.
int ConnectError(int fd);

// The addresses, without ports, that a connected socket is between.  Empty: it is not connected any
// more.
struct HostPair {
  std::string here;
  std::string there;
};
HostPair HostsOf(int fd);

// For a connection: no delay of small messages; it breaks when the peer's host is silent for
// about `silence_s`.
void SetOptions(int fd, double silence_s);

// When it is closed, the connection is reset: the kernel keeps nothing of it.
void ResetOnClose(int fd);

// Raises the soft limit of open files so that `connections` more fit, as far as the hard
// limit allows.  Returns how many files may be open.
size_t MakeRoomForFiles(size_t connections);

}  // namespace tcp
}  // namespace ps

// What ThreadSanitizer cannot see: memory that is sent belongs to the transport until the peer has
// it, and that news comes by way of another process.  Elsewhere all of this is nothing.
//
// A thread that sends notes that it reads the memory, before it does; so a write by a thread that
// has not waited for the end of the message is a race.  Where the end is known (the peer has told
// that it has the message, or its answer is about to be written to the same place) the memory is
// taken back, which orders all that follows behind the reads.

#if defined(__SANITIZE_THREAD__)
#define PS_WATCHES_THREADS 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define PS_WATCHES_THREADS 1
#endif
#endif

#ifdef PS_WATCHES_THREADS
extern "C" {
void __tsan_read_range(void* address, unsigned long bytes);
void __tsan_acquire(void* address);
void __tsan_release(void* address);
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
}
#endif

namespace ps {
namespace tcp {

#ifdef PS_WATCHES_THREADS

inline void NoteRead(const iovec& piece) { __tsan_read_range(piece.iov_base, piece.iov_len); }
// Of a value, behind the reads: `begin` is where it begins.
inline void HandOver(const void* begin) { __tsan_release(const_cast<void*>(begin)); }
inline void TakeBack(const void* begin) { __tsan_acquire(const_cast<void*>(begin)); }

// While it lives, nothing that this thread reads is noted: it was already.
class NotedAlready {
 public:
  NotedAlready() { AnnotateIgnoreReadsBegin(__FILE__, __LINE__); }
  ~NotedAlready() { AnnotateIgnoreReadsEnd(__FILE__, __LINE__); }
  NotedAlready(const NotedAlready&) = delete;
  NotedAlready& operator=(const NotedAlready&) = delete;
};

// The sanitizer's sendmsg would take every later recv of any socket for the end of these reads.
inline ssize_t SendMessage(int fd, const msghdr* message, int flags) {
  return syscall(SYS_sendmsg, fd, message, flags);
}

#else

inline void NoteRead(const iovec& /*piece*/) {}
inline void HandOver(const void* /*begin*/) {}
inline void TakeBack(const void* /*begin*/) {}
struct NotedAlready {
  NotedAlready() {}  // not a variable that nobody uses
};
inline ssize_t SendMessage(int fd, const msghdr* message, int flags) {
  return sendmsg(fd, message, flags);
}

#endif

}  // namespace tcp
}  // namespace ps

#endif  // BYTEPS_NET_TCP_SOCKET_H_
