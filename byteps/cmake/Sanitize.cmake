# BYTEPS_SANITIZE: builds with sanitizers, whose findings end the program.
#
#   address  AddressSanitizer and UndefinedBehaviorSanitizer; with clang also libFuzzer's coverage
#   thread   ThreadSanitizer
set(BYTEPS_SANITIZE "" CACHE STRING "Build with a sanitizer: address, thread, or nothing")
set(BYTEPS_FUZZERS OFF)
if(BYTEPS_SANITIZE STREQUAL "address")
  set(flags -fsanitize=address,undefined -fno-sanitize-recover=all)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
    set(BYTEPS_FUZZERS ON)
    # These checks compare type names, which hidden types do not have.
    list(APPEND flags -fno-sanitize=function,vptr)
    add_compile_options(-fsanitize=fuzzer-no-link)
  endif()
elseif(BYTEPS_SANITIZE STREQUAL "thread")
  set(flags -fsanitize=thread)
elseif(NOT BYTEPS_SANITIZE STREQUAL "")
  message(FATAL_ERROR "BYTEPS_SANITIZE=${BYTEPS_SANITIZE}: it must be address, thread, or empty")
endif()
if(BYTEPS_SANITIZE)
  message(STATUS "Sanitizer: ${BYTEPS_SANITIZE}")
  add_compile_options(${flags} -fno-omit-frame-pointer -gline-tables-only)
  add_link_options(${flags})
endif()
