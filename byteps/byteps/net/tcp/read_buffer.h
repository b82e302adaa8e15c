#ifndef BYTEPS_NET_TCP_READ_BUFFER_H_
#define BYTEPS_NET_TCP_READ_BUFFER_H_

#include <sys/types.h>
#include <sys/uio.h>

#include <cstddef>
#include <vector>

namespace ps {
namespace tcp {

// Buffer of bytes that were read and not parsed yet. Values are mostly read past it, straight into
// their destination.
class ReadBuffer {
 public:
  // Bytes to read besides a value: several small messages, or the next meta and a little of its
  // values, which must be copied.
  static constexpr size_t kBytes = 16384;

  ReadBuffer() : bytes_(kBytes) {}

  size_t size() const { return end_ - begin_; }
  const char* data() const { return bytes_.data() + begin_; }

  // Returns this many bytes, or null if they have not come; the next reads have room for them.
  const char* Peek(size_t bytes);
  void Skip(size_t bytes) { begin_ += bytes; }
  void Clear() { begin_ = end_ = 0; }
  // Frees the memory of a long meta, if possible.
  void Shrink();

  // Space for the next read; Add tells how many were read.
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
