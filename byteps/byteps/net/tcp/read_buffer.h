#ifndef BYTEPS_NET_TCP_READ_BUFFER_H_
#define BYTEPS_NET_TCP_READ_BUFFER_H_

#include <sys/types.h>
#include <sys/uio.h>

#include <cstddef>
#include <vector>

namespace ps {
namespace tcp {

// Buffer of bytes that were read from a socket and are not parsed yet. Most bytes of values do not
// pass through it, because they are read straight into their destination.
class ReadBuffer {
 public:
  // Size of the buffer. It limits the bytes that one read takes besides a value: several small
  // messages, or the next meta and the first bytes of its values, which must then be copied.
  static constexpr size_t kBytes = 16384;

  ReadBuffer() : bytes_(kBytes) {}

  size_t size() const { return end_ - begin_; }
  const char* data() const { return bytes_.data() + begin_; }

  // Returns the next `bytes` bytes. Returns null if not all of them were read yet. The next reads
  // then have room for them.
  const char* Peek(size_t bytes);
  void Skip(size_t bytes) { begin_ += bytes; }
  void Clear() { begin_ = end_ = 0; }
  // Frees the memory of a long meta, if possible.
  void Shrink();

  // Returns the space for the next read. Call Add with the number of bytes read.
  iovec Room();
  void Add(size_t bytes);

 private:
  void Need(size_t bytes);

  std::vector<char> bytes_;
  size_t begin_ = 0;
  size_t end_ = 0;
};

}  // namespace tcp
}  // namespace ps
#endif  // BYTEPS_NET_TCP_READ_BUFFER_H_
