// Functions for sockets: listening, connecting, options.
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

// Listens at `address`; with port 0 the kernel chooses. Sets `port`. Throws Error.
Fd Listen(const Address& address, int* port);

// Starts to connect from address `from` of this host ("": any address). The socket becomes writable
// when the attempt has ended. If the attempt failed at once, returns an empty Fd and sets errno.
Fd BeginConnect(const Address& address, const std::string& from = "");

// Returns the result of the attempt to connect: 0 or an errno.
int ConnectError(int fd);

// Both addresses of a connected socket, without ports. Empty if it is no longer connected.
struct HostPair {
  std::string here;
  std::string there;
};
HostPair HostsOf(int fd);

// Sets options of a connection: it sends small messages without delay, and it breaks when the
// peer's host has been silent for about `silence_s` seconds.
void SetOptions(int fd, double silence_s);

// Makes close() reset the connection, so that the kernel keeps no state of the connection.
void ResetOnClose(int fd);

// Raises the soft limit of open files by `connections`, up to the hard limit. Returns the number of
// files that may be open.
size_t MakeRoomForFiles(size_t connections);

}  // namespace tcp
}  // namespace ps

// Annotations for ThreadSanitizer, empty in other builds. ThreadSanitizer cannot see that the
// transport reads a message's memory until the peer has the message, because the acknowledgement
// passes through another process.
//
// A sending thread first notes its reads of the memory. ThreadSanitizer then reports a race if a
// thread writes to the memory without waiting until the message was sent. TakeBack tells
// ThreadSanitizer that the reads are over: when the peer has acknowledged the message, or when its
// answer is about to be written to the same memory.

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
// Call after the reads of a value that starts at `begin`.
inline void HandOver(const void* begin) { __tsan_release(const_cast<void*>(begin)); }
inline void TakeBack(const void* begin) { __tsan_acquire(const_cast<void*>(begin)); }

// Keeps ThreadSanitizer from noting this thread's reads as long as this object lives, because they
// were noted before.
class NotedAlready {
 public:
  NotedAlready() { AnnotateIgnoreReadsBegin(__FILE__, __LINE__); }
  ~NotedAlready() { AnnotateIgnoreReadsEnd(__FILE__, __LINE__); }
  NotedAlready(const NotedAlready&) = delete;
  NotedAlready& operator=(const NotedAlready&) = delete;
};

// Calls sendmsg, but bypasses ThreadSanitizer's own sendmsg, which would take any later recv for
// the end of these reads.
inline ssize_t SendMessage(int fd, const msghdr* message, int flags) {
  return syscall(SYS_sendmsg, fd, message, flags);
}

#else

inline void NoteRead(const iovec& /*piece*/) {}
inline void HandOver(const void* /*begin*/) {}
inline void TakeBack(const void* /*begin*/) {}
struct NotedAlready {
  NotedAlready() {}  // a constructor of its own, so that compilers do not call a variable unused
};
inline ssize_t SendMessage(int fd, const msghdr* message, int flags) {
  return sendmsg(fd, message, flags);
}

#endif

}  // namespace tcp
}  // namespace ps

#endif  // BYTEPS_NET_TCP_SOCKET_H_
