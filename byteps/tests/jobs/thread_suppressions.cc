// What ThreadSanitizer cannot know; part of every program that it watches.

extern "C" const char* __tsan_default_suppressions() {
  // It notes what sendmsg has read only when that has returned. By then the server's answer may lie
  // in the same memory: it came after all was read, but by way of another process.
  return "race:ps::tcp::Stream::Write\n";
}
